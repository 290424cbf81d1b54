"""Processes of one host: parent-death signals, finding and ending all that carry a mark in their environment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from pathlib import Path

MARK = "TAAS_NODE_AGENT"
"""Environment variable that every rank and all its descendants inherit; its value is unique to one node agent."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Cleared by changes of credentials: call it after them."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def flush_c_streams() -> None:
    """Flush what C code buffered in stdio, which ``os._exit`` would drop."""
    _libc.fflush(None)


def say_end_of_connections() -> None:
    """Tell the other end of every TCP connection of this process that nothing more will come.

    What was sent still arrives, and what the others send is still taken: who waits for more fails at once, as if this
    process had ended, and nobody else notices.
    """
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError, ValueError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.shutdown(socket.SHUT_WR)


def marked(mark: str) -> list[int]:
    """Return the processes that have ``MARK=mark`` in their environment, without this one."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue  # it ended, or belongs to someone else
        if wanted in environ.split(b"\0"):
            found.append(int(entry.name))
    return found


def end_marked(mark: str, *, grace_s: float = 2.0) -> list[int]:
    """End every process that carries the mark: TERM, then KILL after the grace; return those that had to be told."""
    told: set[int] = set()
    deadline = time.monotonic() + grace_s
    while living := marked(mark):
        fresh = set(living) - told
        late = time.monotonic() > deadline
        for pid in living if late else fresh:
            _send(pid, signal.SIGKILL if late else signal.SIGTERM)
        told |= fresh
        if time.monotonic() > deadline + 5:
            break  # stuck in the kernel: nothing more can be done from here
        time.sleep(0.05)
    return sorted(told)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def peak_rss_bytes(pid: int) -> int | None:
    """Return the largest resident size that a living process had, or None."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed on this host for want of memory, or None if it does not say."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None
