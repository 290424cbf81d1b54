"""Machines as processes that run the real programs, forked from one that has imported everything: cheap to kill.

    python -m tests.exact.machines

Reads one JSON order a line and answers each with one: ``{"start": module, "input": path, "log": path}`` -> ``{"pid"}``;
``{"poll": pid}`` -> ``{"status": exit status or None}``. Ends all that it started when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from taas_tasks.prep import inspect_program, prepare_program

ROOT = Path(__file__).parents[2]
PROGRAMS: dict[str, ModuleType] = {"inspect": inspect_program, "prepare": prepare_program}


class Machines:
    """The test's end: starts, kills and awaits machines. A machine is a process group of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, program: str, given: dict[str, Any], folder: Path) -> int:
        """Start a program in a folder of its own; return its process id."""
        folder.mkdir()
        (folder / "input.json").write_text(json.dumps(given))
        return int(self._order({"start": program, "folder": str(folder)})["pid"])

    def kill(self, pid: int) -> None:
        """Kill a machine with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self.wait(pid)

    def wait(self, pid: int, *, timeout_s: float = 90) -> int:
        """Return a machine's exit status, negative for a signal."""
        deadline = time.monotonic() + timeout_s
        while (status := self._order({"poll": pid})["status"]) is None:
            assert time.monotonic() < deadline, f"machine {pid} does not end"
            time.sleep(0.02)
        return int(status)

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextlib.contextmanager
def running_machines() -> Iterator[Machines]:
    """Machines for a test; none is left behind."""
    command = [sys.executable, "-m", "tests.exact.machines"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield Machines(process)
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


# --- the other end ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve until the input ends."""
    ended: dict[int, int] = {}
    alive: set[int] = set()
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if "start" in order:
                alive.add(pid := _fork(order))
                answer: dict[str, Any] = {"pid": pid}
            else:
                answer = {"status": _poll(order["poll"], ended, alive)}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _poll(pid: int, ended: dict[int, int], alive: set[int]) -> int | None:
    if pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            return None
        ended[pid] = os.waitstatus_to_exitcode(status)
        alive.discard(pid)
    return ended[pid]


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the child does it as well: whoever is first
            os.setpgid(pid, pid)
        return pid
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    code = 70
    try:
        folder = Path(order["folder"])
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        null = os.open(os.devnull, os.O_RDONLY)
        for mine, standard in ((null, 0), (log, 1), (log, 2)):
            os.dup2(mine, standard)
        code = PROGRAMS[order["start"]].main([str(folder / "input.json")])
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
