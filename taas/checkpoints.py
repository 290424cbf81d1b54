"""Checkpoints of a training: whole or not there, whatever is killed when; the same one on every rank of every host.

In ``checkpoints/`` of the project folder (outside a run: of the current folder) each one is a data file under a name of
its own, and a marker, written last, that names the data: what has no marker does not count. Rank 0 writes, since only
rank 0 can; ``latest`` on several ranks is rank 0's answer, sent to all.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from taas.context import current
from taas.errors import ArtifactError

FOLDER = "checkpoints"
"""Below the project folder."""
# Exactly the names that a save makes: a user's own files beside them stay.
_NAME = r"step-[0-9]{12}(?:\.json|-[0-9a-f]{8}\.pt)"
_OURS = re.compile(rf"{_NAME}|\.{_NAME}\.[0-9a-f]{{8}}\.tmp")


@dataclass(frozen=True)
class Marker:
    """What a marker file says: the step, and name and size of the data."""

    step: int
    data: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        """The name of the marker's own file."""
        return f"step-{self.step:012d}.json"


class Checkpoints:
    """``taas.checkpoint(state, step=n)`` saves, ``taas.checkpoint.latest()`` loads."""

    def __call__(self, state: Any, *, step: int, keep: int = 2) -> None:
        """Save a state (what ``torch.save`` takes) on rank 0; other ranks pass. When it returns, it survives a kill.

        Args:
            state: For instance ``{"model": model.state_dict(), "loader": loader.state_dict()}``.
            step: The number by which the newest is known; saving a step again replaces it.
            keep: How many complete checkpoints stay.

        Raises:
            ArtifactError: ``step`` or ``keep`` is no such number, or the disk refused.
        """
        for name, value, least in (("step", step, 0), ("keep", keep, 1)):
            if type(value) is not int or value < least:
                raise ArtifactError(f"{name} of a checkpoint: got {value!r}; allowed: an integer of at least {least}")
        _progressed()
        if _is_writer():
            _write(_folder(), state, step=step, keep=keep)
            _progressed()

    def latest(self, *, map_location: Any = "cpu") -> tuple[int, Any] | None:
        """Return (step, state) of the newest complete checkpoint, or None when there is none.

        With a process group every rank calls it and gets what rank 0 found, on other hosts too.

        Raises:
            ArtifactError: the run has several ranks and no process group yet, or the data cannot be read.
        """
        run = current()
        group = _group_size()
        if run is not None and run.world_size > 1 and group == 1:
            raise ArtifactError(
                "taas.checkpoint.latest() is rank 0's answer, sent to all ranks; call "
                "torch.distributed.init_process_group(backend='nccl', init_method='env://') before it"
            )
        found = _load(_folder(), map_location) if _is_writer() else None
        return _from_rank0(found) if group > 1 else found


checkpoint = Checkpoints()


def newest(folder: Path) -> tuple[Marker, float] | None:
    """Return the marker of the newest complete checkpoint in ``folder``, and when it was written (Unix seconds)."""
    for marker in markers(folder):
        with contextlib.suppress(FileNotFoundError):  # a newer one has just taken its place
            return marker, (folder / marker.file_name).stat().st_mtime
    return None


def _progressed() -> None:
    run = current()
    if run is not None:
        run.progressed()


def _write(folder: Path, state: Any, *, step: int, keep: int) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _save(folder, state, step)
        _prune(folder, keep)
    except OSError as error:
        raise ArtifactError(f"cannot save a checkpoint in {folder}: {error.strerror or error}") from error


def _folder() -> Path:
    run = current()
    return (run.project_dir if run else Path.cwd()) / FOLDER


def _group_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _is_writer() -> bool:
    import torch.distributed as dist

    run = current()
    if run is not None:
        return run.is_rank0
    return _group_size() == 1 or dist.get_rank() == 0


def _from_rank0(found: tuple[int, Any] | None) -> tuple[int, Any] | None:
    import torch.distributed as dist

    box: list[Any] = [found]
    dist.broadcast_object_list(box, src=0)
    answer: tuple[int, Any] | None = box[0]
    return answer


def _save(folder: Path, state: Any, step: int) -> None:
    import torch

    data = folder / f"step-{step:012d}-{secrets.token_hex(4)}.pt"
    with _replacing(data) as file:
        torch.save(state, file)
    marker = Marker(step, data.name, data.stat().st_size)
    with _replacing(folder / marker.file_name) as file:
        file.write(json.dumps(asdict(marker)).encode())


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file that takes the place of ``path`` at the end, whole and on disk, or leaves no trace."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def markers(folder: Path) -> list[Marker]:
    """Return the markers whose data is there whole, the newest first."""
    found = []
    for path in folder.glob("step-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            marker = Marker(**json.loads(path.read_bytes()))
            if (folder / marker.data).stat().st_size == marker.num_bytes:
                found.append(marker)
    return sorted(found, key=lambda marker: marker.step, reverse=True)


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the newest complete checkpoints, markers first, and what killed saves have left."""
    kept = markers(folder)[:keep]
    names = {marker.file_name for marker in kept} | {marker.data for marker in kept}
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in names:
            path.unlink(missing_ok=True)


def _load(folder: Path, map_location: Any) -> tuple[int, Any] | None:
    import torch

    for marker in markers(folder):
        path = folder / marker.data
        try:
            # The project's own files are code that this process runs anyway: any object may be in a state.
            return marker.step, torch.load(path, map_location=map_location, weights_only=False)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ArtifactError(
                f"cannot read the checkpoint {path}: {error}; remove it to go on from an older"
            ) from error
    return None
