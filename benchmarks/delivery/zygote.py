"""Runs the members of a lane (ranks, a feeder) as forks of a process that has imported everything.

    python -m benchmarks.delivery.zygote MODULE

Each line of the input is a run: its members, each with the ``reader`` of ``MODULE`` to call and that one's ``given``.
A reader prepares and returns what is to be measured. When all members are prepared they start at the same moment; the
seconds end with the last rank, the CPU seconds are of all members and their children, from that moment on.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_LIMIT_S = 90.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask for SIGKILL at the parent's death."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def _member(module: Any, member: dict[str, Any], out: Path, ready: int, start: int) -> None:
    """The life of a fork."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    os.setpgid(0, 0)
    os.environ.update(member.get("env", {}))
    try:
        measured = getattr(module, member["reader"])(**member["given"])
        before = _cpu_s(resource.RUSAGE_SELF) + _cpu_s(resource.RUSAGE_CHILDREN)
        os.write(ready, b"x")
        os.read(start, 1)
        found = {"before": before, **(measured() or {}), "ended": time.monotonic()}
    except BaseException as error:  # noqa: BLE001 (told to the benchmark)
        last = traceback.format_exception(error)[-4:]
        found = {"error": f"{type(error).__name__}: {error}"[:600], "traceback": "".join(last)[-2000:]}
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(found))
    temporary.replace(out)


class _Run:
    def __init__(self, module: Any, given: dict[str, Any], folder: Path) -> None:
        self._module, self._folder = module, folder
        self._members: list[dict[str, Any]] = given["members"]
        self._limit = time.monotonic() + given.get("limit_s", _LIMIT_S)
        self._pids: dict[int, int] = {}  # pid -> place, of those that run
        self._cpu_s = [0.0] * len(self._members)

    def __call__(self) -> dict[str, Any]:
        ready_out, ready_in = os.pipe()
        start_out, start_in = os.pipe()
        try:
            for place, member in enumerate(self._members):
                self._fork(place, member, ready_in, start_out)
            self._await_ready(ready_out)
            started = time.monotonic()
            os.write(start_in, b"x" * len(self._members))
            self._await(lambda: all("service" in self._members[place] for place in self._pids.values()))
            for pid in self._pids:  # services
                os.kill(pid, signal.SIGTERM)
            self._await(lambda: not self._pids)
            return self._found(started)
        except (RuntimeError, TimeoutError) as error:
            return {"error": self._errors() or str(error)}
        finally:
            self._end()
            for descriptor in (ready_out, ready_in, start_out, start_in):
                os.close(descriptor)

    def _out(self, place: int) -> Path:
        return self._folder / f"{place}.json"

    def _fork(self, place: int, member: dict[str, Any], ready: int, start: int) -> None:
        self._out(place).unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                _member(self._module, member, self._out(place), ready, start)
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)
        self._pids[pid] = place

    def _await_ready(self, ready: int) -> None:
        missing = len(self._members)
        while missing:
            if select.select([ready], [], [], 0.1)[0]:
                missing -= len(os.read(ready, missing))
            self._reap()
            if missing and len(self._pids) < len(self._members):
                raise RuntimeError("a member ended before the start")
            self._check_time()

    def _await(self, condition: Any) -> None:
        while not condition():
            self._reap()
            self._check_time()
            if self._errors():
                raise RuntimeError("a member failed")
            time.sleep(0.002)

    def _check_time(self) -> None:
        if time.monotonic() > self._limit:
            raise TimeoutError("it took too long and was ended")

    def _reap(self) -> None:
        for pid in list(self._pids):
            ended, _, used = os.wait4(pid, os.WNOHANG)
            if ended:
                self._cpu_s[self._pids.pop(pid)] = used.ru_utime + used.ru_stime

    def _errors(self) -> str:
        found = [self._result(place) for place in range(len(self._members)) if self._out(place).exists()]
        return "; ".join(f"{one['error']}\n{one['traceback']}" for one in found if "error" in one)

    def _result(self, place: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._out(place).read_text())
        return found

    def _found(self, started: float) -> dict[str, Any]:
        results = [self._result(place) for place in range(len(self._members))]
        ranks = [one for one, member in zip(results, self._members, strict=True) if "service" not in member]
        seconds = max(one["ended"] for one in ranks) - started
        used = [all_of_it - one["before"] for all_of_it, one in zip(self._cpu_s, results, strict=True)]
        services = sum(one for one, member in zip(used, self._members, strict=True) if "service" in member)
        return {"seconds": seconds, "cpu_s": sum(used), "services_cpu_s": services, "ranks": ranks}

    def _end(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._pids.clear()


def main(argv: list[str]) -> int:
    """Serve runs until the input ends."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a run under way then ends its members and their children
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    module, folder = importlib.import_module(argv[0]), Path(argv[1])
    print(json.dumps({"versions": module.versions()}), file=answers, flush=True)
    gc.freeze()  # a collection in a fork would copy every page
    for line in sys.stdin:
        print(json.dumps(_Run(module, json.loads(line), folder)()), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
