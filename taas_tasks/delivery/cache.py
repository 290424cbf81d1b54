"""Bringing a part of a segment into a cache file, verified. The file has no name: it is gone when nobody maps it."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from taas.errors import DeliveryError, ObjectCorrupt, ObjectMissing
from taas_tasks.delivery.parts import PartLayout, Segment
from taas_tasks.store.base import ObjectStore

_log = logging.getLogger(__name__)
_ATTEMPTS = 3
_FIRST_PAUSE_S = 0.2


def fetch_part(
    store: ObjectStore,
    segment: Segment,
    lanes: int,
    layout: PartLayout,
    *,
    cache_dir: Path,
    host: str,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Return the descriptor of a file that holds the part, every checksum verified.

    Bytes that are wrong or missing are fetched again, ``_ATTEMPTS`` times in all.

    Raises:
        DeliveryError: they stay wrong or missing, or the disk is full; names segment and host.
        StoreError: the store could not be read.
    """
    for attempt in range(_ATTEMPTS):
        file = _new_file(cache_dir, layout.num_bytes, host=host)
        try:
            _fill(store, segment, lanes, layout, file)
            return file
        except (ObjectCorrupt, ObjectMissing) as error:
            os.close(file)
            if attempt == _ATTEMPTS - 1:
                raise _lost(segment, host, error) from error
            _log.warning("%s; fetching it again", _lost(segment, host, error))
            pause(_FIRST_PAUSE_S * 2**attempt)
        except BaseException:
            os.close(file)
            raise
    raise AssertionError("unreachable")


def _lost(segment: Segment, host: str, error: Exception) -> DeliveryError:
    return DeliveryError(
        f"segment {segment.n} of epoch {segment.epoch} of loader '{segment.loader}' (object {segment.key}) could not "
        f"be brought to host {host}: {error}. It was committed whole and changed or removed since: prepare it again",
        loader=segment.loader,
        epoch=segment.epoch,
        n=segment.n,
        key=segment.key,
        host=host,
    )


def _new_file(folder: Path, num_bytes: int, *, host: str) -> int:
    """Return a file without a name whose blocks are allocated: a full disk is found here, not by a SIGBUS later."""
    file = _unnamed(folder)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        os.close(file)
        raise DeliveryError(
            f"host {host} cannot allocate {num_bytes} bytes of cache in {folder}: {error.strerror}; free some space "
            "there or lower cache_gb in the request",
            host=host,
        ) from error
    return file


def _unnamed(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    file, path = tempfile.mkstemp(dir=folder, prefix="part-")  # a file system without O_TMPFILE
    Path(path).unlink()
    return file


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
