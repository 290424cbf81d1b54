"""The peers' own environment below ``var/bench-peers``, made from ``benchmarks/peers/requirements.txt``."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "benchmarks/peers/requirements.txt"
STAND_INS = ROOT / "benchmarks/peers/stand_ins"
FOLDER = ROOT / "var/bench-peers"
LIBRARIES = ("streaming", "webdataset", "litdata")


def python() -> Path:
    """Return the Python of the peers' environment."""
    return FOLDER / "bin/python"


def ensure() -> None:
    """Make the environment unless it is there as the lock says.

    Raises:
        SystemExit: it cannot be installed; says why.
    """
    wanted = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    ready = FOLDER / ".ready"
    if ready.exists() and ready.read_text() == wanted:
        return
    print(f"making the peers' environment in {FOLDER} (once, some minutes)", file=sys.stderr, flush=True)
    _call(sys.executable, "-m", "venv", str(FOLDER))
    _call(str(FOLDER / "bin/pip"), "install", "--quiet", "--no-deps", "--disable-pip-version-check", "-r", str(LOCK))
    ready.write_text(wanted)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with code {done.returncode}: {done.stderr[-2000:]}")


def environment(library: str) -> dict[str, str]:
    """Return the environment of a program that uses one of the libraries."""
    path = [str(ROOT), *([str(STAND_INS)] if library == "streaming" else [])]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "BENCH_LIBRARY": library, "LITDATA_DISABLE_VERSION_CHECK": "1"}
