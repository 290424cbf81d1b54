"""Long-running processes that outlive their starter: started with a log file, found again, stopped for good.

A process is known by pid *and* start time, so a pid that the kernel gave to someone else is never signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MARKER = "TAAS_STACK"  # in the environment of every process of a stack, and inherited by all that they start


# What this process started and did not yet see end: kept, as a forgotten Popen warns of a process that runs on.
_children: dict[int, subprocess.Popen[bytes]] = {}
_LAST_THREADS_S = 5.0


@dataclass(frozen=True)
class ProcessId:
    """A process, and no other one that gets its pid later. ``started_ticks``: clock ticks since boot."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the identity of a process that runs now."""
        fields = _stat(pid)
        return None if fields is None else cls(pid, int(fields[19]))

    def is_alive(self) -> bool:
        """Return whether it still runs; a zombie does not."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[19]) == self.started_ticks and fields[0] not in ("Z", "X")

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.is_alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` behind the command's name (which may hold spaces and brackets)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


@dataclass(frozen=True)
class User:
    """An unprivileged user that a process runs as."""

    uid: int
    gid: int


def start(argv: list[str], *, env: Mapping[str, str], log: Path, cwd: Path, user: User | None = None) -> ProcessId:
    """Start a process in a session of its own; its output is appended to ``log``."""
    with log.open("ab") as output:
        popen = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=[] if user else None,
        )
    found = ProcessId.of(popen.pid)
    if found is None:
        raise OSError(f"{argv[0]} vanished at its start")
    _children[popen.pid] = popen
    return found


def stop(process: ProcessId, *, grace_s: float, first: signal.Signals = signal.SIGTERM) -> None:
    """Stop a process: ``first``, and KILL after the grace. Returns when it is gone (or a zombie of someone else)."""
    process.send(first)
    if not wait_until(lambda: not process.is_alive(), timeout_s=grace_s):
        process.send(signal.SIGKILL)
        wait_until(lambda: not process.is_alive(), timeout_s=10.0)
    reap(process.pid)


def reap(pid: int) -> None:
    """Take the exit status of one that ``start`` started here and that has ended, so that no zombie is left."""
    child = _children.get(pid)
    if child is None:
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_LAST_THREADS_S)  # it looks dead from when its first thread has ended
        del _children[pid]


def wait_until(condition: Callable[[], bool], *, timeout_s: float, every_s: float = 0.05) -> bool:
    """Return whether the condition came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def marked(marks: set[bytes]) -> list[ProcessId]:
    """Return the processes whose environment has one of ``marks`` (``NAME=value``), however started or orphaned."""
    return matching(lambda pid: not marks.isdisjoint(_nul_list(pid, "environ")))


def matching(is_wanted: Callable[[int], bool]) -> list[ProcessId]:
    """Return the living processes that ``is_wanted(pid)`` names, never this one."""
    found = [ProcessId.of(pid) for pid in _all_pids() if pid != os.getpid() and is_wanted(pid)]
    return [process for process in found if process is not None and process.is_alive()]


def arguments(pid: int) -> list[bytes]:
    """Return a process's command line; empty when it is gone."""
    return _nul_list(pid, "cmdline")


def _all_pids() -> Iterable[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208 - names only, and fast


def _nul_list(pid: int, name: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")[:-1]
    except OSError:  # gone, or another user's
        return []


def kill_all(find: Callable[[], list[ProcessId]], *, timeout_s: float = 10.0) -> int:
    """Kill what ``find`` finds, and what those start meanwhile, until it finds nothing; return how many there were."""
    seen: set[ProcessId] = set()

    def none_left() -> bool:
        found = find()
        seen.update(found)
        for process in found:
            process.send(signal.SIGKILL)
        return not found

    wait_until(none_left, timeout_s=timeout_s)
    for process in seen:
        reap(process.pid)
    return len(seen)


def tail(log: Path, *, num_lines: int = 15) -> str:
    """Return the last lines of a log, or a word that there is none."""
    if not log.exists():
        return "(no log)"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
