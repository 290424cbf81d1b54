"""Bringing a part of a segment into a cache file, verified. The file has no name: it is gone when nobody maps it."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import random
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from taas.errors import DeliveryError, ObjectCorrupt, ObjectMissing, StoreUnavailable
from taas_tasks.delivery.parts import PartLayout, Segment
from taas_tasks.store.base import ObjectStore

_log = logging.getLogger(__name__)
_NAMED = "part-"
_ATTEMPTS = 3
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 20.0
_REPAIRS = 2
_STORE_PATIENCE_S = 900.0
_jitter = random.Random()  # the hosts of a training must not all come back at the same moment

Repair = Callable[[Segment, str], None]
"""Has a segment prepared again, given why; returns when its object is whole again."""


class _Lost(Exception):
    """A part stays wrong or missing however often it is fetched."""


def fetch_part(
    store: ObjectStore,
    segment: Segment,
    lanes: int,
    layout: PartLayout,
    *,
    cache_dir: Path,
    host: str,
    repair: Repair | None = None,
    store_patience_s: float = _STORE_PATIENCE_S,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Return the descriptor of a file that holds the part, every checksum verified.

    Bytes that are wrong or missing are fetched again, ``_ATTEMPTS`` times in all, then the segment is repaired. A store
    that does not answer is waited for: the ranks' work is worth more than some idle minutes.

    Raises:
        DeliveryError: they stay wrong or missing, or the disk is full; names segment and host.
        StoreError: the store cannot be read; when it does not answer, after ``store_patience_s``.
    """
    errand = _Errand(store, segment, lanes, layout, host, store_patience_s, pause)
    for turn in range(_REPAIRS + 1):
        file = _new_file(cache_dir, layout.num_bytes, host=host)
        try:
            errand.bring(file)
            return file
        except _Lost as lost:
            os.close(file)
            if repair is None or turn == _REPAIRS:
                raise errand.lost(lost) from lost
            reason = str(lost)
        except BaseException:
            os.close(file)
            raise
        repair(segment, reason)
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class _Errand:
    """One part to be brought."""

    store: ObjectStore
    segment: Segment
    lanes: int
    layout: PartLayout
    host: str
    store_patience_s: float
    pause: Callable[[float], None]

    def bring(self, file: int) -> None:
        """Fill the file; wait for a store that does not answer."""
        given_up_at = time.monotonic() + self.store_patience_s
        for turn in count():
            try:
                return self._try(file)
            except StoreUnavailable as error:
                if time.monotonic() >= given_up_at:
                    raise
                _log.warning("%s; host %s waits for it with %s", error.message, self.host, self._what)
            self.pause(_jitter.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**turn)))
        raise AssertionError("unreachable")

    def _try(self, file: int) -> None:
        """Fill the file, again when bytes are wrong or missing."""
        for attempt in range(_ATTEMPTS):
            try:
                return _fill(self.store, self.segment, self.lanes, self.layout, file)
            except (ObjectCorrupt, ObjectMissing) as error:
                if attempt == _ATTEMPTS - 1:
                    raise _Lost(error.message) from error
                _log.warning("%s; fetching it again", self.lost(error))
            self.pause(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    @property
    def _what(self) -> str:
        segment = self.segment
        return f"segment {segment.n} of epoch {segment.epoch} of loader '{segment.loader}' (object {segment.key})"

    def lost(self, error: Exception) -> DeliveryError:
        """Return the error for bytes that stay wrong or missing."""
        return DeliveryError(
            f"{self._what} could not be brought to host {self.host}: {error}. It was committed whole and changed or "
            "removed since",
            loader=self.segment.loader,
            epoch=self.segment.epoch,
            n=self.segment.n,
            key=self.segment.key,
            host=self.host,
        )


def _new_file(folder: Path, num_bytes: int, *, host: str) -> int:
    """Return a file without a name whose blocks are allocated: a full disk is found here, not by a SIGBUS later."""
    file = _unnamed(folder)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        free_bytes = _free_bytes(file)
        os.close(file)
        raise DeliveryError(
            f"host {host} cannot allocate {num_bytes} bytes of cache in {folder}, where {free_bytes} bytes are free: "
            f"{error.strerror}; free some space there or lower cache_gb in the request",
            host=host,
            needed_bytes=num_bytes,
            free_bytes=free_bytes,
        ) from error
    return file


def _free_bytes(file: int) -> int:
    found = os.fstatvfs(file)
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


def make_cache_folder(folder: Path) -> None:
    """Make the folder of the cache files; what a killed feeder left is removed, living ones keep what they use."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{_NAMED}*"):
        path.unlink(missing_ok=True)


def _fill(store: ObjectStore, segment: Segment, lanes: int, layout: PartLayout, file: int) -> None:
    mapping = mmap.mmap(file, layout.num_bytes)
    view = memoryview(mapping)
    try:
        for span in layout.spans:
            store.read_into(segment.key, span.start, view[span.place : span.place + span.length])
        _verify(segment, lanes, layout, view)
    finally:
        with contextlib.suppress(BufferError):  # after an error its traceback holds slices: they let go with it
            view.release()
            mapping.close()


def _verify(segment: Segment, lanes: int, layout: PartLayout, view: memoryview) -> None:
    checks = [("the schema", 0, segment.schema_length, segment.schema_crc32)]
    for one, (lane, place, length) in zip(segment.lanes(lanes), layout.lanes, strict=True):
        checks.append((f"lane {lane}", place, length, one.crc32))
    for what, place, length, expected in checks:
        got = zlib.crc32(view[place : place + length])
        if got != expected:
            raise ObjectCorrupt(
                f"{what} has checksum {got:#010x}, not {expected:#010x} as when it was written", key=segment.key
            )
