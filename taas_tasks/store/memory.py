"""An object store in this process's memory: the contract of S3 without a server, for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import RLock

from taas.errors import ObjectCorrupt, ObjectMissing
from taas_tasks.store.base import Content, ObjectInfo, UsePiece
from taas_tasks.store.files import write_then_move
from taas_tasks.store.keys import check_key


class MemoryStore:
    """Keeps objects in a dictionary. Safe to use from several threads, not from several processes."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    def put(self, key: str, data: Content) -> None:
        """Write an object whole, from one piece or from its parts in order; an existing one is replaced."""
        content = bytes(data) if isinstance(data, bytes | memoryview) else b"".join(data)
        with self._lock:
            self._objects[check_key(key)] = (content, time.time())

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from a file."""
        self.put(key, path.read_bytes())

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write the object unless the key is taken; True when this call wrote it."""
        with self._lock:
            if check_key(key) in self._objects:
                return False
            self.put(key, data)
            return True

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        with self._lock:
            if check_key(key) not in self._objects:
                raise ObjectMissing(f"no object has the key {key!r}", key=key)
            return self._objects[key][0]

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop)."""
        if stop <= start:
            return b""
        content = self.get(key)
        if len(content) < stop:
            raise ObjectCorrupt(f"object {key!r} ends at byte {len(content)}; asked were {start} to {stop}", key=key)
        return content[start:stop]

    def read_into(self, key: str, start: int, buffer: memoryview, use: UsePiece) -> None:
        """Fill the buffer with the bytes from ``start`` on, and call ``use(0, buffer)``."""
        buffer[:] = self.get_range(key, start, start + len(buffer))
        use(0, buffer)

    def get_file(self, key: str, path: Path) -> None:
        """Write the object to a file: a temporary beside it, then moved."""
        content = self.get(key)
        with write_then_move(path) as file:
            file.write(content)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of the object, or None."""
        with self._lock:
            found = self._objects.get(check_key(key))
        return None if found is None else ObjectInfo(key, len(found[0]), found[1])

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below ``prefix`` in the order of their keys, from behind ``start_after``."""
        with self._lock:
            found = [ObjectInfo(key, len(data), at) for key, (data, at) in self._objects.items()]
        wanted = [info for info in found if info.key.startswith(prefix) and info.key.encode() > start_after.encode()]
        yield from sorted(wanted, key=lambda info: info.key.encode())

    def delete(self, key: str) -> None:
        """Remove the object; one that is not there is fine."""
        with self._lock:
            self._objects.pop(check_key(key), None)

    def presign_get(self, key: str, *, expires_s: int) -> str:
        """Return a name for the object that looks like a URL; nothing serves it."""
        return f"memory:///{check_key(key)}?method=GET&expires={expires_s}"

    def presign_put(self, key: str, *, expires_s: int) -> str:
        """Return a name for the object that looks like a URL; nothing serves it."""
        return f"memory:///{check_key(key)}?method=PUT&expires={expires_s}"
