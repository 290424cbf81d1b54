"""Everything about preparing and delivering data, measured beside what people would use instead, in one run.

    python -m benchmarks.bench_delivery [--quick] [--only delivery,prep]

Leaves ``var/bench/delivery.json`` (lanes and ratios), ``delivery.md`` (the table) and ``delivery.png``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.delivery import peers, table
from benchmarks.delivery.common import Options, Section
from benchmarks.delivery.zygote import die_with_parent

PARTS = ("delivery", "prep", "overlap", "memory", "scale")
_PACKAGES = ("torch", "numpy", "pyarrow", "boto3")


def machine() -> dict[str, Any]:
    """Return what was measured on."""
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(),
        "cpu": model[0] if model else platform.machine(),
        "memory_bytes": memory,
        "system": platform.platform(),
        "load_before": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Return the versions of our side and, where their environment is there, of the peers'."""
    from importlib.metadata import version

    found = {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
    for line in peers.LOCK.read_text().splitlines():
        name, _, number = line.partition("==")
        if name in ("mosaicml-streaming", "webdataset", "litdata"):
            found[name] = number
    return found


def measure_apart(part: str, options: Options) -> Section:
    """Run one part in a process of its own: parts fork, and must not do so beside threads that others left."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(part, options, theirs))
    child.start()
    theirs.close()
    try:
        found: Section = mine.recv()
    except EOFError:
        found = Section(notes=[f"{part} FAILED: its process ended"])
    finally:
        child.terminate()  # when this one is told to end: the part then stops what it has started
        child.join()
    return found


def _send(part: str, options: Options, answer: Connection) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    answer.send(measure(part, options))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is left to do is to end


def measure(part: str, options: Options) -> Section:
    """Run one part; one that fails leaves a note with the reason."""
    name = f"benchmarks.delivery.{part}"
    if importlib.util.find_spec(name) is None:
        return Section(notes=[f"{part}: not part of this release"])
    started = time.monotonic()
    try:
        found: Section = importlib.import_module(name).run(options)
    except (Exception, SystemExit) as error:  # the other parts are measured all the same
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            raise  # told to end; with a text it says what this part lacks
        traceback.print_exc()
        return Section(notes=[f"{part} FAILED: {type(error).__name__}: {error}"])
    print(f"{part}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return found


def merge(before: dict[str, Any], sections: dict[str, Section]) -> dict[str, Any]:
    """Return the results of a run as JSON."""
    return {
        **before,
        "lanes": [lane.to_dict() for section in sections.values() for lane in section.lanes],
        "ratios": {name: value for section in sections.values() for name, value in section.ratios.items()},
        "notes": [note for section in sections.values() for note in section.notes],
    }


def _write(results: dict[str, Any], out: Path) -> str:
    (out / "delivery.json").write_text(json.dumps(results, indent=1))
    text = table.markdown(results)
    (out / "delivery.md").write_text(text)
    if peers.python().exists():
        command = [str(peers.python()), str(Path(__file__).parent / "delivery/plot.py")]
        command += [str(out / "delivery.json"), str(out / "delivery.png")]
        env = {**peers.environment("plot"), "MPLCONFIGDIR": tempfile.gettempdir()}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            print(f"no plot: {done.stderr[-500:]}", file=sys.stderr)
    return text


def _scratch() -> Path:
    """Return a new folder, in memory where there is room."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="taas-bench-", dir=shared if os.access(shared, os.W_OK) else None))


def _passed(results: dict[str, Any]) -> bool:
    ours = [lane for lane in results["lanes"] if lane["name"].startswith("taas")]
    return not any(lane["void"] for lane in ours) and not any(" FAILED: " in note for note in results["notes"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less data, fewer repetitions: some minutes")
    parser.add_argument("--repetitions", type=int, help="5, or 2 with --quick")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {','.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=peers.ROOT / "var/bench")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given.out.mkdir(parents=True, exist_ok=True)
    started, sections = time.monotonic(), {}
    before = {"machine": machine(), "versions": versions(), "quick": given.quick}
    scratch = _scratch()
    try:
        for part in given.only.split(","):
            own = scratch / part
            own.mkdir()
            options = Options(given.quick, given.repetitions or (2 if given.quick else 5), given.out, own)
            sections[part] = measure_apart(part, options)
            shutil.rmtree(own, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    results = merge({**before, "seconds": round(time.monotonic() - started)}, sections)
    print(_write(results, given.out))
    return 0 if _passed(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
