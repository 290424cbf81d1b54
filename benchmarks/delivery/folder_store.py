"""An object store in a folder: what a client spends on a store whose server runs on another machine.

Writes cost the copy into the kernel that a socket costs as well; nobody spends CPU on the other side. For benchmarks on
one machine of few cores, where a real server would take what the measured processes need.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from taas.errors import ObjectMissing
from taas_tasks.store.base import Content, ObjectInfo, ObjectStore, UsePiece


class FolderStore:
    """Keys are paths below ``root``. As far as preparation and delivery need the protocol."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, key: str, data: Content) -> None:
        parts = [data] if isinstance(data, bytes | memoryview) else data
        temporary = self._temporary()
        with temporary.open("wb", buffering=0) as file:
            for part in parts:
                file.write(part)
        self._path(key).parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(self._path(key))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        temporary = self._temporary()
        temporary.write_bytes(data)
        self._path(key).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(temporary, self._path(key))
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            raise ObjectMissing(f"no object has the key {key!r}", key=key) from None

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self.get(key)[start:stop]

    def read_into(self, key: str, start: int, buffer: memoryview, use: UsePiece) -> None:
        buffer[:] = self.get_range(key, start, start + len(buffer))
        use(0, buffer)

    def get_file(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.get(key))

    def head(self, key: str) -> ObjectInfo | None:
        try:
            found = self._path(key).stat()
        except FileNotFoundError:
            return None
        return ObjectInfo(key, found.st_size, found.st_mtime)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        folder = self._path(prefix.rpartition("/")[0]) if "/" in prefix else self._root
        keys = sorted(str(path.relative_to(self._root)) for path in folder.rglob("*") if path.is_file())
        for key in keys:
            info = self.head(key) if key.startswith(prefix) and key > start_after else None
            if info is not None:
                yield info

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._root / key

    def _temporary(self) -> Path:
        folder = self._root / ".new"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / secrets.token_hex(8)


def folder_store(root: Path) -> ObjectStore:
    """Return the store as the protocol that preparation asks for."""
    return cast(ObjectStore, FolderStore(root))
