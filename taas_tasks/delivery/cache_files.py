"""The files of a host's cache. They have no name, stay mapped in the feeder, and are used again.

Allocating, zeroing and freeing pages costs several times what it costs to fill them, so a file that is not needed any
more is filled anew, when no other process can still see it: an element that a rank keeps is never overwritten. The
kernel tells: it grants a write lease on a file only while nobody else has it open or mapped (fcntl(2), F_SETLEASE).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAMED = "part-"
_MIN_SPARE_BYTES = 1 << 16
_MAX_RESTING = 16  # each costs two descriptors


class CacheFile:
    """A file that is mapped here for writing and given to ranks for reading only.

    Args:
        folder: where it is made.
        num_bytes: allocated now, so that filling it cannot fail.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._most_bytes = num_bytes + max(num_bytes // 8, _MIN_SPARE_BYTES)  # of parts that are nearly as large
        self.num_bytes = 0
        self._file = _unnamed(folder)
        try:
            os.ftruncate(self._file, self._most_bytes)
            self._mapping = mmap.mmap(self._file, self._most_bytes)
            os.ftruncate(self._file, 0)
            self.resize(num_bytes)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def view(self) -> memoryview:
        """The bytes of the file."""
        return memoryview(self._mapping)[: self.num_bytes]

    def fits(self, num_bytes: int) -> bool:
        """Whether it can be resized to this, and is worth it."""
        return self._most_bytes // 2 <= num_bytes <= self._most_bytes

    def resize(self, num_bytes: int) -> None:
        """Have exactly so many bytes allocated; what they are is undefined. Of views only those below may be used."""
        os.ftruncate(self._file, num_bytes)
        if num_bytes > self.num_bytes:
            os.posix_fallocate(self._file, self.num_bytes, num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Give a descriptor for reading, closed at the end: who is to keep the file gets a duplicate."""
        descriptor = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def is_ours_alone(self) -> bool:
        """Whether nobody else has it open or mapped; False also where the file system cannot tell."""
        try:
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Let go of it: its bytes are freed when nobody sees them any more."""
        with contextlib.suppress(BufferError):  # a view is still there; the mapping goes with it
            self._mapping.close()
        os.close(self._file)


class CacheFiles:
    """Makes files and uses them again. Safe to use from several threads.

    Args:
        folder: where they are made.
        most_bytes: files that are not in use are kept, some of them, while all have no more bytes than this.
    """

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._resting: list[CacheFile] = []  # the one that was used last is the last one

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, those that rest included."""
        return self._used_bytes + sum(one.num_bytes for one in self._resting)

    def take(self, num_bytes: int) -> CacheFile:
        """Return a file of so many bytes, which may be anything.

        Raises:
            OSError: there is no room for it, even when all that is not in use is given up.
        """
        with self._lock:
            self._used_bytes += num_bytes
            found = self._fitting(num_bytes)
            self._trim()
        try:
            return self._resized(found, num_bytes)
        except OSError:
            with self._lock:
                self._trim(most_bytes=0)
        try:
            return CacheFile(self.folder, num_bytes)
        except OSError:
            with self._lock:
                self._used_bytes -= num_bytes
            raise

    def give_back(self, file: CacheFile) -> None:
        """Take a file that is not needed any more; others may still see it."""
        with self._lock:
            self._used_bytes -= file.num_bytes
            self._resting.append(file)
            self._trim()

    def close(self) -> None:
        """Let go of the files that are not in use."""
        with self._lock:
            self._trim(most_bytes=0)

    def _fitting(self, num_bytes: int) -> CacheFile | None:
        fitting = (one for one in reversed(self._resting) if one.fits(num_bytes))
        found = next((one for one in fitting if one.is_ours_alone()), None)
        if found is not None:
            self._resting.remove(found)
        return found

    def _resized(self, found: CacheFile | None, num_bytes: int) -> CacheFile:
        if found is None:
            return CacheFile(self.folder, num_bytes)
        try:
            found.resize(num_bytes)
        except OSError:
            found.close()
            raise
        return found

    def _trim(self, *, most_bytes: int | None = None) -> None:
        limit = self._most_bytes if most_bytes is None else most_bytes
        while self._resting and (self.num_bytes > limit or len(self._resting) > _MAX_RESTING):
            self._resting.pop(0).close()


def make_cache_folder(folder: Path) -> None:
    """Make the folder of the cache files; what a killed feeder left is removed, living ones keep what they use."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{_NAMED}*"):
        path.unlink(missing_ok=True)


def free_bytes(folder: Path) -> int:
    """Return how many bytes can be written there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _unnamed(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    file, path = tempfile.mkstemp(dir=folder, prefix=_NAMED)  # a file system without O_TMPFILE
    Path(path).unlink(missing_ok=True)
    return file
