"""From loaded segments to committed ones, beside the loading: one thread encodes, one uploads and commits.

Bounded: while one segment is loaded, at most one waits or is encoded and one waits or is uploaded; a faster loader
waits in ``submit``. The first error of any part stops all and is raised where segments are submitted or finished.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from taas.errors import ElementError
from taas_tasks.prep.allocation import keep_freed_memory
from taas_tasks.prep.commit import Committed, Producer, Segment, Times, commit, put_object, put_position, record_of
from taas_tasks.shards.writer import EncodedShard, encode_segment
from taas_tasks.store.base import ObjectStore

_MAX_IN_FLIGHT = 3


@dataclass(frozen=True)
class LoadedSegment:
    """A segment's elements in order, padding last. ``position``: how its loader worker reads on behind it."""

    segment: Segment
    elements: list[Any]
    started_at: float
    load_s: float
    position: bytes | None = None


class Pipeline:
    """Encodes, uploads and commits what is submitted. A context manager: leaving it waits for all that is on its way.

    ``on_commit`` is called in the uploading thread.
    """

    def __init__(
        self,
        store: ObjectStore,
        producer: Producer,
        *,
        allow_pickle: bool,
        on_commit: Callable[[Segment, Committed], None],
    ) -> None:
        self._store = store
        self._producer = producer
        self._allow_pickle = allow_pickle
        self._on_commit = on_commit
        self._room = threading.Semaphore(_MAX_IN_FLIGHT)
        self._error: BaseException | None = None

    def __enter__(self) -> Pipeline:
        keep_freed_memory()  # after the loader workers were forked: theirs is the user's affair
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._uploading = ThreadPoolExecutor(1, thread_name_prefix="upload")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._encoding.shutdown(wait=True)
        finally:
            self._uploading.shutdown(wait=True)
        if error is None:
            self.check()

    def submit(self, loaded: LoadedSegment) -> None:
        """Hand over a loaded segment; waits while too many are on their way.

        Raises:
            TaasError: An earlier segment could not be encoded, uploaded or committed.
        """
        self._room.acquire()
        self.check()
        self._encoding.submit(self._guarded, lambda: self._encode(loaded))

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Wait until all that was submitted is committed; nothing runs in the threads inside the context.

        That is where a process can be forked safely: no thread of this process holds a lock of a C library.
        """
        for _ in range(_MAX_IN_FLIGHT):
            self._room.acquire()
        try:
            self.check()
            yield
        finally:
            self._room.release(_MAX_IN_FLIGHT)

    def check(self) -> None:
        """Raise the first error of any part, if there was one."""
        if self._error is not None:
            raise self._error

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run one step of a segment; after a failure nothing more is begun, and the segment's room is free again."""
        try:
            if self._error is None:
                step()
            else:
                self._room.release()
        except BaseException as error:  # noqa: BLE001 (handed to the submitting thread)
            self._error = self._error or error
            self._room.release()

    def _encode(self, loaded: LoadedSegment) -> None:
        began = time.perf_counter()
        shard = self._encoded(loaded)
        times = Times(loaded.started_at, loaded.load_s, time.perf_counter() - began)
        loaded.elements.clear()
        self._uploading.submit(self._guarded, lambda: self._upload(loaded, shard, times))

    def _encoded(self, loaded: LoadedSegment) -> EncodedShard:
        segment = loaded.segment
        try:
            return encode_segment(zip(segment.indices, loaded.elements, strict=True), allow_pickle=self._allow_pickle)
        except ElementError as error:
            raise ElementError(
                f"loader {self._producer.loader!r}, epoch {segment.epoch}, elements {segment.start} to"
                f" {segment.stop - 1}: {error.message}",
                **error.fields,
            ) from None

    def _upload(self, loaded: LoadedSegment, shard: EncodedShard, times: Times) -> None:
        began = time.perf_counter()
        segment, position = loaded.segment, loaded.position
        key = put_object(self._store, self._producer, segment, shard)
        behind = None if position is None else put_position(self._store, self._producer, segment, position)
        record = record_of(
            self._producer,
            segment,
            shard,
            key=key,
            times=times,
            upload_s=time.perf_counter() - began,
            committed_at=time.time(),
            position_key=behind,
        )
        self._on_commit(segment, commit(self._store, record, run=self._producer.run))
        self._room.release()
