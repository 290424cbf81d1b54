"""Runs a function in a process of its own, forked from the fork server: torch is imported there, CUDA never touched.

What the function touches (CUDA, process groups, a user's payload) dies with its process; the agent reads what it said.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from taas_tasks.launch.files import write_json
from taas_tasks.launch.processes import die_with_parent

_TAIL_CHARS = 3000
_POLL_S = 0.02


class AsideFailed(Exception):
    """The function raised, its process died, or it took too long; the message says which."""


class Aside:
    """One such process: a context manager, at whose end it is gone. ``target`` returns the text that ``wait`` gives."""

    def __init__(self, target: Callable[..., str], *args: Any, folder: Path, name: str) -> None:
        self._said = folder / f"aside-{name}.json"
        self._raised = folder / f"aside-{name}.error"
        for path in (self._said, self._raised):
            path.unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run, args=(target, args, self._said, self._raised), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def wait(self, *, timeout_s: float, check: Callable[[], None] = lambda: None) -> str:
        """Return what the function returned. ``check`` is called meanwhile and raises to wait no longer.

        Raises:
            AsideFailed: There is no result.
        """
        deadline = time.monotonic() + timeout_s
        while self._process.is_alive():
            check()
            if time.monotonic() > deadline:
                raise AsideFailed(f"it did not end within {timeout_s:.0f} s")
            self._process.join(_POLL_S)
        if self._raised.exists():
            raise AsideFailed(self._raised.read_text())
        if not self._said.exists():
            raise AsideFailed(f"its process ended with code {self._process.exitcode}")
        return self._said.read_text()


def _run(target: Callable[..., str], args: tuple[Any, ...], said: Path, raised: Path) -> None:
    alive: Any = multiprocessing.forkserver._forkserver
    if alive._forkserver_alive_fd is not None:
        os.close(alive._forkserver_alive_fd)  # else the fork server would live as long as this process
        alive._forkserver_alive_fd = None
    die_with_parent()
    try:
        write_json(said, target(*args))
    except BaseException:  # noqa: BLE001  # whatever it is, the agent is to say it
        write_json(raised, traceback.format_exc()[-_TAIL_CHARS:])
    os._exit(0)  # destructors of process groups may hang
