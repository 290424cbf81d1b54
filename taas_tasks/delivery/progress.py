"""What a rank has done so far, in one small mapped file: the node agent finds hangs by it, a step costs no system call.

Outside a rank nothing is mapped and the counting goes nowhere.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<qqq")
_COUNT, _OPTIMIZER_STEPS, _WAITING = range(3)

_mine: MutableSequence[int] | memoryview = [0, 0, 0]


@dataclass(frozen=True)
class Progress:
    """What a rank's file says. ``count``: all that counts as progress; ``waits_for_data``: in a delivered loader."""

    count: int
    optimizer_steps: int
    waits_for_data: bool


def begin(path: Path) -> None:
    """Count in this file from here on; called once in a rank."""
    global _mine
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(bytes(_LAYOUT.size))
    temporary.replace(path)
    with path.open("r+b") as file:
        _mine = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def note() -> None:
    """Count something that shows that the script goes on."""
    _mine[_COUNT] += 1


def note_optimizer_step() -> None:
    """Count a step of an optimizer: from the first one on the script has started up."""
    _mine[_OPTIMIZER_STEPS] += 1
    note()


@contextmanager
def waiting_for_data() -> Iterator[None]:
    """Say that this rank waits for elements that are not there yet: that is no hang."""
    _mine[_WAITING] = 1
    try:
        yield
    finally:
        _mine[_WAITING] = 0


def read_progress(path: Path) -> Progress | None:
    """Return what a rank has done so far, or None while it has not begun to count."""
    try:
        count, optimizer_steps, waiting = _LAYOUT.unpack(path.read_bytes())
    except (FileNotFoundError, struct.error):
        return None
    return Progress(count, optimizer_steps, bool(waiting))
