"""The object store's protocol: the few operations that everything else is built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

Content: TypeAlias = bytes | memoryview | Sequence[memoryview]
UsePiece: TypeAlias = Callable[[int, memoryview], object]


@dataclass(frozen=True)
class ObjectInfo:
    """An object as a listing or a head shows it; ``modified_at`` in unix seconds."""

    key: str
    num_bytes: int
    modified_at: float


class ObjectStore(Protocol):
    """An S3-like store below one prefix. Keys are relative to it. Safe to use from several threads.

    Raises (all methods): ObjectMissing, StoreRefused, StoreUnavailable (after jittered retries).
    """

    def put(self, key: str, data: Content) -> None:
        """Write an object whole, from one piece or from its parts in order; an existing one is replaced."""

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from a file, in parts when large."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write the object unless the key is taken (``If-None-Match: *``); True when this call wrote it.

        After a lost reply the call is retried and may answer False for its own write: compare the content.
        """

    def get(self, key: str) -> bytes:
        """Return the whole object."""

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop)."""

    def read_into(self, key: str, start: int, buffer: memoryview, use: UsePiece) -> None:
        """Fill a buffer with the bytes from ``start`` on, and call ``use(offset, piece)`` as they arrive.

        A piece is a slice of the buffer, at ``offset``; they come in order. When all must be read again (keys that
        expired), pieces come from offset 0 on again; what ``use`` raises ends the reading.
        """

    def get_file(self, key: str, path: Path) -> None:
        """Write the object to a file: a temporary beside it, then moved."""

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of the object, or None."""

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below ``prefix`` in the order of their keys, from behind ``start_after``."""

    def delete(self, key: str) -> None:
        """Remove the object; one that is not there is fine."""

    def presign_get(self, key: str, *, expires_s: int) -> str:
        """Return a URL of the public endpoint that reads this one key."""

    def presign_put(self, key: str, *, expires_s: int) -> str:
        """Return a URL of the public endpoint that writes this one key."""
