"""Files as content-addressed objects: the key is the sha256 of the bytes, so a blob is written once, and for good."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from taas.errors import ObjectCorrupt, ProjectError
from taas_tasks.layout import ProjectKeys
from taas_tasks.store import ObjectStore
from taas_tasks.store.files import write_then_move
from taas_tasks.values import Value

T = TypeVar("T")
R = TypeVar("R")

_IN_MEMORY_BYTES = 16 << 20
_NUM_THREADS = 8
_NUM_TRIES = 3
PLAIN, EXECUTABLE = 0o644, 0o755


class FileEntry(Value):
    """A file of a project: its content's sha256 and size, and whether it is executable (mode 0644 or 0755)."""

    sha256: str
    bytes: int
    mode: int = PLAIN


def in_threads(act: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``act`` of each item, in order, by several threads; the first error ends it."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        futures = [pool.submit(act, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def describe_file(path: Path) -> FileEntry:
    """Return the entry of a file on disk; links are not followed."""
    with open(path, "rb", opener=_open_no_link) as file:
        about = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(sha256=digest, bytes=about.st_size, mode=_mode(about.st_mode))


def describe_bytes(data: bytes) -> FileEntry:
    """Return the entry of a plain file with this content."""
    return FileEntry(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def _mode(st_mode: int) -> int:
    return EXECUTABLE if st_mode & 0o100 else PLAIN


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def put_blob(store: ObjectStore, keys: ProjectKeys, source: bytes | Path) -> FileEntry:
    """Make the content a blob of the project, unless it is one, and return its entry.

    Raises:
        ProjectError: the file changed each time while it was read.
    """
    if isinstance(source, bytes):
        return _put_bytes(store, keys, source, describe_bytes(source))
    for _ in range(_NUM_TRIES):
        entry = _put_file(store, keys, source)
        if entry is not None:
            return entry
    raise ProjectError(f"{source} changes while it is read: something still writes it", path=str(source))


def _put_file(store: ObjectStore, keys: ProjectKeys, path: Path) -> FileEntry | None:
    """Put a file's content; None when it changed between its hashing and its upload."""
    before = path.lstat()
    if before.st_size <= _IN_MEMORY_BYTES:
        with open(path, "rb", opener=_open_no_link) as file:
            data = file.read()
        described = describe_bytes(data).model_copy(update={"mode": _mode(before.st_mode)})
        return _put_bytes(store, keys, data, described)
    entry = describe_file(path)
    if not has_blob(store, keys, entry):
        if _version(path) != (before.st_size, before.st_mtime_ns):
            return None
        store.put_file(keys.blob(entry.sha256), path)
        if _version(path) != (before.st_size, before.st_mtime_ns):
            store.delete(keys.blob(entry.sha256))  # its bytes may not be those of its name
            return None
    return entry


def _version(path: Path) -> tuple[int, int]:
    about = path.lstat()
    return about.st_size, about.st_mtime_ns


def _put_bytes(store: ObjectStore, keys: ProjectKeys, data: bytes, entry: FileEntry) -> FileEntry:
    if not has_blob(store, keys, entry):
        store.put(keys.blob(entry.sha256), data)
    return entry


def has_blob(store: ObjectStore, keys: ProjectKeys, entry: FileEntry) -> bool:
    """Return whether the content is in the store."""
    found = store.head(keys.blob(entry.sha256))
    return found is not None and found.num_bytes == entry.bytes


def fetch_blob(store: ObjectStore, keys: ProjectKeys, entry: FileEntry, path: Path) -> None:
    """Make ``path`` a file with this content and mode, whole or not at all; the sha256 is verified before.

    Raises:
        ObjectCorrupt: the stored bytes are not those of the sha256.
        ObjectMissing: the content is not in the store.
    """
    key = keys.blob(entry.sha256)
    if entry.bytes <= _IN_MEMORY_BYTES:
        data = store.get(key)
        _verify(entry, describe_bytes(data), key)
        with write_then_move(path, mode=entry.mode) as file:
            file.write(data)
        return
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        store.get_file(key, temporary)
        _verify(entry, describe_file(temporary), key)
        temporary.chmod(entry.mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _verify(wanted: FileEntry, found: FileEntry, key: str) -> None:
    if found.sha256 != wanted.sha256:
        raise ObjectCorrupt(f"object {key!r} has the sha256 {found.sha256}, not that of its name", key=key)
