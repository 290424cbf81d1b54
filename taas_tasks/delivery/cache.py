"""Bringing a part of a segment into a cache file, verified."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from taas.errors import DeliveryError, ObjectCorrupt, ObjectMissing, StoreUnavailable
from taas_tasks.delivery.cache_files import CacheFile, CacheFiles, free_bytes
from taas_tasks.delivery.parts import PartLayout, Segment
from taas_tasks.shards.checksum import crc32
from taas_tasks.store.base import ObjectStore

_log = logging.getLogger(__name__)
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
    files: CacheFiles,
    host: str,
    repair: Repair | None = None,
    store_patience_s: float = _STORE_PATIENCE_S,
    pause: Callable[[float], None] = time.sleep,
) -> CacheFile:
    """Return a file that holds the part, every checksum verified.

    Bytes that are wrong or missing are fetched again, ``_ATTEMPTS`` times in all, then the segment is repaired. A store
    that does not answer is waited for: the ranks' work is worth more than some idle minutes.

    Raises:
        DeliveryError: they stay wrong or missing, or the disk is full; names segment and host.
        StoreError: the store cannot be read; when it does not answer, after ``store_patience_s``.
    """
    errand = _Errand(store, segment, lanes, layout, files, host, store_patience_s, pause)
    for turn in range(_REPAIRS + 1):
        file = errand.take_file()
        try:
            errand.bring(file.view)
            return file
        except _Lost as lost:
            files.give_back(file)
            if repair is None or turn == _REPAIRS:
                raise errand.lost(lost) from lost
            reason = str(lost)
        except BaseException:
            files.give_back(file)
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
    files: CacheFiles
    host: str
    store_patience_s: float
    pause: Callable[[float], None]

    def take_file(self) -> CacheFile:
        """Return a file for the part; what it holds is undefined."""
        try:
            return self.files.take(self.layout.num_bytes)
        except OSError as error:
            raise self._full(error) from error

    def bring(self, view: memoryview) -> None:
        """Fill the file; wait for a store that does not answer."""
        given_up_at = time.monotonic() + self.store_patience_s
        for turn in count():
            try:
                return self._try(view)
            except StoreUnavailable as error:
                if time.monotonic() >= given_up_at:
                    raise
                _log.warning("%s; host %s waits for it with %s", error.message, self.host, self._what)
            self.pause(_jitter.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**turn)))
        raise AssertionError("unreachable")

    def _try(self, view: memoryview) -> None:
        """Fill the file, again when bytes are wrong or missing."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._fill(view)
            except (ObjectCorrupt, ObjectMissing) as error:
                if attempt == _ATTEMPTS - 1:
                    raise _Lost(error.message) from error
                _log.warning("%s; fetching it again", self.lost(error))
            self.pause(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    def _fill(self, view: memoryview) -> None:
        checks = _checks(self.segment, self.lanes, self.layout)
        for span in self.layout.spans:
            end = span.place + span.length
            checker = _Checker(
                span.place, [one for one in checks if span.place <= one.start < end], key=self.segment.key
            )
            self.store.read_into(self.segment.key, span.start, view[span.place : end], checker.take)

    def _full(self, error: OSError) -> DeliveryError:
        free = free_bytes(self.files.folder)
        return DeliveryError(
            f"host {self.host} cannot have {self.layout.num_bytes} bytes of cache in {self.files.folder}, where "
            f"{free} bytes are free: {error.strerror}; free some space there or lower cache_gb in the request",
            host=self.host,
            needed_bytes=self.layout.num_bytes,
            free_bytes=free,
        )

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


class _Checker:
    """Compares the checksums of the lanes in a span while its bytes are still in the processor's cache."""

    def __init__(self, place: int, checks: list[_Check], *, key: str) -> None:
        self._place, self._checks, self._key = place, checks, key
        self._next = self._crc = 0

    def take(self, offset: int, piece: memoryview) -> None:
        """Take the bytes that stand ``offset`` behind the span's start."""
        if offset == 0:  # the first time, or all anew
            self._next = self._crc = 0
        start = self._place + offset
        while self._next < len(self._checks):
            check = self._checks[self._next]
            low, high = max(start, check.start), min(start + len(piece), check.stop)
            if low < high:
                self._crc = crc32(piece[low - start : high - start], self._crc)
            if start + len(piece) < check.stop:
                return
            self._end(check)

    def _end(self, check: _Check) -> None:
        got, self._crc = self._crc, 0
        self._next += 1
        if got != check.crc32:
            raise ObjectCorrupt(
                f"{check.what} has checksum {got:#010x}, not {check.crc32:#010x} as when it was written", key=self._key
            )


@dataclass(frozen=True)
class _Check:
    """Bytes of the cache file with a known checksum."""

    what: str
    start: int
    stop: int
    crc32: int


def _checks(segment: Segment, lanes: int, layout: PartLayout) -> list[_Check]:
    found = [_Check("the schema", 0, segment.schema_length, segment.schema_crc32)]
    for one, (lane, place, length) in zip(segment.lanes(lanes), layout.lanes, strict=True):
        found.append(_Check(f"lane {lane}", place, place + length, one.crc32))
    return found
