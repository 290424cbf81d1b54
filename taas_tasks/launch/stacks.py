"""Where ranks stand: each dumps the Python stacks of all its threads when the node agent asks by a signal.

``faulthandler`` answers in C, so also a rank answers that waits in a collective or holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from taas_tasks.launch.script import CELL_NAME

SIGNAL = int(signal.SIGRTMAX) - 5
"""A real-time signal that no scheduler or trainer uses: SIGUSR1 and SIGUSR2 stay free for the user's code."""

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_OTHER_WAITS = {
    ("torch/autograd/graph.py", "_engine_run_backward"): "backward (DDP's all_reduce)",
    ("torch/nn/parallel/distributed.py", None): "DistributedDataParallel",
    ("torch/cuda/__init__.py", "synchronize"): "torch.cuda.synchronize",
}
_QUIET_S = 0.2


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Place:
    """Where a rank's main thread stands. ``collective``: what it waits in with its peers, or None."""

    where: str
    collective: str | None

    def sentence(self) -> str:
        """Say it in a few words."""
        return (
            f"waited in {self.collective} at {self.where}" if self.collective else f"sat in user code at {self.where}"
        )


def answer(path: Path) -> None:
    """Have this process append its stacks to ``path`` whenever the signal comes. Called once, in a rank."""
    faulthandler.register(SIGNAL, file=path.open("ab"), all_threads=True, chain=False)


def take(pids: Mapping[int, int], files: Mapping[int, Path], *, within_s: float = 3.0) -> dict[int, str]:
    """Return the stacks of each rank that answers in time.

    Args:
        pids: of the ranks.
        files: where each rank answers.
        within_s: how long to wait for the last one.
    """
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
    deadline = time.monotonic() + within_s
    before: dict[int, str] = {}
    while (now := {rank: _text(files[rank]) for rank in pids}) != before or not all(now.values()):
        if time.monotonic() > deadline:
            break
        before = now
        time.sleep(_QUIET_S)
    return {rank: text for rank, text in now.items() if text}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def main_thread(text: str) -> list[Frame]:
    """Return the main thread's frames, the innermost first; it is the last of those that faulthandler lists."""
    last = text.strip().split("\n\n")[-1]
    return [Frame(*found.groups()) for line in last.splitlines() if (found := _FRAME.match(line))]


def place_of(frames: Sequence[Frame], project: Path) -> Place:
    """Return where a main thread with these frames stands.

    Does not know: what C code waits for that Python calls directly (``work.wait()``, ``tensor.item()`` on a GPU).
    """
    if not frames:
        return Place("an unknown place: it did not answer", None)
    depth = next((number for number, frame in enumerate(frames) if _is_users(frame, project)), len(frames))
    inner = frames[:depth]  # below the user's code; what is above it started the rank
    where = _shown(frames[depth] if depth < len(frames) else frames[0], project)
    collective = _collective(inner)
    if collective is None and inner:
        where = f"{where}, inside {inner[0].function} of {Path(inner[0].file).name}"
    return Place(where, collective)


def _is_users(frame: Frame, project: Path) -> bool:
    return frame.file == CELL_NAME or frame.file.startswith(f"{project}{os.sep}")


def _shown(frame: Frame, project: Path) -> str:
    name = frame.file.removeprefix(f"{project}{os.sep}")
    return f"{name}:{frame.line} ({frame.function})"


def _collective(frames: Sequence[Frame]) -> str | None:
    """Return what the thread waits in with its peers: the outermost function of torch.distributed, as users call it."""
    called = [frame.function for frame in frames if frame.file.endswith(_COLLECTIVES)]
    if called:
        return called[-1]
    for frame in frames:
        for (file, function), name in _OTHER_WAITS.items():
            if frame.file.endswith(file) and function in (None, frame.function):
                return name
    return None
