"""What each rank consumed, in one small mapped file per pass: right up to the last element, also after a SIGKILL."""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path

from taas.errors import DeliveryError
from taas_tasks.result_values import RankPass

_MAGIC = b"TAASPAS1"
_FIXED = struct.Struct("<8siiqq??6xH")  # magic, rank, number, epoch, offset, complete, replay, name's length
_COUNTS = struct.Struct("<qqd")  # steps, bytes, seconds of waiting
_COUNTS_AT = 64
_NAME_AT = _COUNTS_AT + _COUNTS.size
_COMPLETE_AT = 32
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def _prefix(loader: str, rank: int) -> str:
    return f"{_UNSAFE.sub('-', loader)}.{rank:06d}."


class PassCounters:
    """The counters of one pass that is under way; the file is complete from the first moment on."""

    def __init__(
        self, folder: Path, *, loader: str, rank: int, number: int, epoch: int, offset: int, replay: bool
    ) -> None:
        name = loader.encode()
        content = bytearray(_NAME_AT + len(name))
        _FIXED.pack_into(content, 0, _MAGIC, rank, number, epoch, offset, False, replay, len(name))
        content[_NAME_AT:] = name
        path = folder / f"{_prefix(loader, rank)}{number:08d}.pass"
        temporary = path.with_suffix(".new")
        temporary.write_bytes(content)
        temporary.replace(path)
        with path.open("r+b") as file:
            self._mapping = mmap.mmap(file.fileno(), 0)
        self.steps = memoryview(self._mapping)[_COUNTS_AT : _COUNTS_AT + 8].cast("q")
        """One number that is written at each step: how many were taken."""

    def count(self, *, num_bytes: int, wait_s: float) -> None:
        """Write what has been read and waited so far."""
        _COUNTS.pack_into(self._mapping, _COUNTS_AT, self.steps[0], num_bytes, wait_s)

    def complete(self) -> None:
        """Say that the pass took its last step."""
        self._mapping[_COMPLETE_AT] = 1

    def close(self) -> None:
        """Let go of the file; it stays."""
        self.steps.release()
        self._mapping.close()


def next_number(folder: Path, *, loader: str, rank: int) -> int:
    """Return the number of a rank's next pass: passes of earlier tries of the process count."""
    prefix = _prefix(loader, rank)
    names = [path.name for path in folder.iterdir() if path.name.startswith(prefix)]
    numbers = [int(name[len(prefix) :].partition(".")[0]) for name in names]
    return max(numbers, default=-1) + 1


def read_steps(path: Path) -> int:
    """Return how many steps a pass has made so far; 0 where the file is gone."""
    try:
        with path.open("rb") as file:
            file.seek(_COUNTS_AT)
            return int.from_bytes(file.read(8), "little")
    except FileNotFoundError:
        return 0


def read_passes(counters_dir: str | Path) -> list[RankPass]:
    """Return what every rank consumed, by loader, rank and number, as far as the files in ``counters_dir`` tell.

    Raises:
        DeliveryError: a file is not one of ours; names it.
    """
    paths = sorted(Path(counters_dir).glob("*.pass"))
    return sorted((_read(path) for path in paths), key=lambda one: (one.loader, one.rank, one.number))


def _read(path: Path) -> RankPass:
    content = path.read_bytes()
    if len(content) < _NAME_AT or not content.startswith(_MAGIC):
        raise DeliveryError(f"{path} is no counters file of a pass of this version", path=str(path))
    _, rank, number, epoch, offset, complete, replay, length = _FIXED.unpack_from(content)
    num_steps, num_bytes, wait_s = _COUNTS.unpack_from(content, _COUNTS_AT)
    return RankPass(
        loader=content[_NAME_AT : _NAME_AT + length].decode(),
        rank=rank,
        number=number,
        epoch=epoch,
        offset=offset,
        num_steps=num_steps,
        complete=complete,
        replay=replay,
        wait_s=wait_s,
        num_bytes=num_bytes,
    )
