"""The fork server from which all ranks of a node come: one process with one thread that has imported torch.

Forking the agent itself hung in 2-8 % of launches (another of its threads held a lock of the C library); a fork server
has no other threads.
"""

from __future__ import annotations

import multiprocessing.forkserver as forkserver
import multiprocessing.process
import multiprocessing.util
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

_WORTH_PRELOADING = ("pytorch_lightning", "lightning")
"""Slow imports (3 s in each process) that start no thread."""
_IMPORT = re.compile(rb"^\s*(?:import|from)\s+([A-Za-z_]\w*)", re.MULTILINE)
_MAX_SOURCE_BYTES = 1 << 20
_PRELOAD_VARIABLE = "TAAS_PRELOAD"


def imports_of(folder: Path) -> set[str]:
    """Return the top-level names that the project's Python files import, as far as their text tells."""
    found: set[bytes] = set()
    for path in folder.rglob("*.py"):
        if path.is_file() and path.stat().st_size <= _MAX_SOURCE_BYTES:
            found.update(_IMPORT.findall(path.read_bytes()))
    return {name.decode() for name in found}


def worth_preloading(imported: set[str]) -> list[str]:
    """Return which of the project's imports the fork server should have."""
    return [name for name in _WORTH_PRELOADING if name in imported]


def start(env: Mapping[str, str], *, preload: list[str]) -> None:
    """Start a fresh fork server in ``env``; returns at once, it imports while the agent goes on."""
    stop()
    name_semaphores(f"/taas-{os.getpid()}")
    forkserver.set_forkserver_preload(["taas_tasks.launch.preload"])
    resource_tracker.ensure_running()  # in the agent's own environment: it is shared, and outlives the ranks
    with _environment({**env, _PRELOAD_VARIABLE: ",".join(preload)}):
        forkserver.ensure_running()


def pid() -> int | None:
    """Return the fork server's pid, or None where none runs."""
    server: Any = forkserver._forkserver
    found: int | None = server._forkserver_pid
    return found


def stop() -> None:
    """End the fork server, if there is one, and with it (parent-death signal) any rank that is left."""
    running = pid()
    if running is not None:
        with suppress(ProcessLookupError):
            os.kill(running, signal.SIGKILL)
        server: Any = forkserver._forkserver
        server._stop()


def name_semaphores(prefix: str) -> None:
    """Have the named semaphores of this process begin with ``prefix``: one that is left says whose it was."""
    multiprocessing.process.current_process()._config["semprefix"] = prefix  # type: ignore[attr-defined]


def unlink_semaphores() -> None:
    """Take away the names of this process's semaphores: who has them open keeps them, and no kill leaves them.

    By the finalizers that multiprocessing keeps for them, each of which unlinks, tells the tracker and runs once.
    """
    for finalizer in list(multiprocessing.util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            finalizer()


def stop_resource_tracker(*, grace_s: float = 2.0) -> None:
    """End multiprocessing's tracker; it removes shared memory that killed ranks have left, so it gets a moment."""
    unlink_semaphores()  # else it does, and the finalizers of this process complain at its exit
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None:
        return
    os.close(tracker._fd)
    found, tracker._fd, tracker._pid = tracker._pid, None, None
    deadline = time.monotonic() + grace_s
    while os.waitpid(found, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(found, signal.SIGKILL)
        time.sleep(0.01)


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    """Have a child process start in another environment: multiprocessing offers no argument for it."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
