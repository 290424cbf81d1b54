"""Says in the rank's log why a write into the project folder failed, and what to do."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS_IN = {
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.remove": (0,),
    "os.mkdir": (0,),
    "os.rmdir": (0,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.utime": (0,),
}
_REFUSALS = (errno.EROFS, errno.EACCES, errno.EPERM)
_PHRASES = ("Read-only file system", "cannot be opened", "file not opened", "failed to open", "Permission denied")


def explanation(rank: int, path: str) -> str:
    """Return the sentence for a refused path."""
    return (
        f"[taas] rank {rank} may not write {path!r}: only rank 0 writes the project folder. Guard the save with"
        ' `if rank == 0:`, or ask for other_ranks: "scratch" to give every other rank a private copy.'
    )


class WriteNotice:
    """An audit hook that notices attempts to write below the project folder and says, once per path, why they fail."""

    def __init__(self, rank: int, project: Path) -> None:
        self.rank = rank
        self.project = str(project)
        self.refused: list[str] = []

    def install(self) -> None:
        """Begin to listen. An audit hook cannot be taken away again."""
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Take one audit event; called very often, so it looks at the event's name first."""
        if event == "open":
            if isinstance(args[2], int) and args[2] & _WRITING:
                self._see(args[0])
        elif event in _PATHS_IN:
            for position in _PATHS_IN[event]:
                self._see(args[position])

    def explain(self, error: BaseException) -> str | None:
        """Return the sentence when ``error`` comes from a refused write, else None."""
        if isinstance(error, OSError) and error.errno in _REFUSALS and error.filename is not None:
            inside = self._inside(error.filename)
            return explanation(self.rank, inside) if inside is not None else None
        # C++ code (torch.save of a path) raises RuntimeError, and no audit event tells of its attempt.
        if any(phrase in str(error) for phrase in _PHRASES):
            return explanation(self.rank, self.refused[-1] if self.refused else "a file of the project")
        return None

    def _see(self, path: Any) -> None:
        inside = self._inside(path)
        if inside is None or inside in self.refused or "__pycache__" in inside:
            return
        self.refused.append(inside)
        sys.stderr.write(explanation(self.rank, inside) + "\n")

    def _inside(self, path: Any) -> str | None:
        """Return the path relative to the project, or None where it is elsewhere."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None  # a descriptor: it was opened before
        name = Path(os.fsdecode(path))
        try:
            full = name.parent.resolve() / name.name  # a link is itself what would be replaced or removed
        except OSError:
            return None  # no folder to resolve from: the call itself will say so
        return str(full.relative_to(self.project)) if full.is_relative_to(self.project) else None
