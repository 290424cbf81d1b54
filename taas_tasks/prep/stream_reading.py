"""Where a machine stands in one stream: what it reads next, and what it has gathered for the next segment.

Two places: the segment that is committed next, and the element that is read next, which lies before it while a retry
passes over what is committed. Nothing here does I/O.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from taas_tasks.plan import segment_bounds
from taas_tasks.prep.commit import Segment
from taas_tasks.prep.elements import owned
from taas_tasks.prep.pipeline import LoadedSegment
from taas_tasks.prep.virtual_workers import Positioned, Read, StreamEnd, VirtualWorker
from taas_tasks.streams import lengths_of_streams
from taas_tasks.values import LoaderPlan


class Stream:
    """One stream of a loader whose workers are its streams; ``worker`` reads it while there is something to read."""

    def __init__(self, number: int, *, plan: LoaderPlan) -> None:
        self.number = number
        self.worker: VirtualWorker | None = None
        self._plan = plan
        self._tells_positions = plan.inspection.has_position
        self.enter(0, 0, 0)
        self.read(0)

    # --- what is committed

    def enter(self, epoch: int, n: int, start: int) -> None:
        """Go to an epoch of which segments below ``n``, elements below ``start``, are committed."""
        self.epoch = epoch
        self.is_closed = False
        self._held: LoadedSegment | None = None
        self._elements: list[Any] = []
        self._position: bytes | None = None
        self._began = time.time(), time.perf_counter()
        self._go_on(n, start)

    def _go_on(self, n: int, start: int) -> None:
        self._n, self.start, self._stop = n, start, start + self._size(n)
        self._ask_n, self._ask_stop = n, self._stop

    def _size(self, n: int) -> int:
        start, stop = segment_bounds(self._plan.sizes, n)
        return stop - start

    def length(self, epoch: int) -> int | None:
        """Return how many elements the stream has in an epoch, where that is known beforehand (map-style)."""
        inspection = self._plan.inspection
        lengths = inspection.epoch_lengths[epoch : epoch + 1]
        whole = lengths[0] if lengths else inspection.epoch_length
        return None if whole is None else lengths_of_streams(self._plan.num_streams, whole)[self.number]

    # --- what is read

    def read(self, epoch: int, position: int = 0) -> None:
        """Let the worker read on from a position of an epoch."""
        self.reading = epoch
        self._asked = self._came = position
        self.has_ended = self.length(epoch) == 0

    @property
    def is_passing_over(self) -> bool:
        """Whether the epoch that is read lies before the one of which segments are committed."""
        return self.reading < self.epoch

    def reads(self, limit: int, *, room: int, row: Callable[[int, int], Any]) -> Iterator[Read]:
        """Yield the next reads: at most ``room``, of positions below ``limit``."""
        if self._asked == self._came and not self._elements:
            self._began = time.time(), time.perf_counter()
        for _ in range(room):
            if self.has_ended or self._asked >= limit:
                return
            position, self._asked = self._asked, self._asked + 1
            is_stop = not self.is_passing_over and self._asked == self._ask_stop
            tells = self._tells_positions and (is_stop or self._asked == limit)
            index = position * self._plan.num_streams + self.number
            yield Read(self.reading, position, row(self.reading, index), tells_position=tells)
            if is_stop:
                self._ask_n += 1
                self._ask_stop += self._size(self._ask_n)

    def take(self, read: Read, found: Any) -> Iterator[LoadedSegment]:
        """Take in what came for a read; yield the segments that are ready by that."""
        if read.epoch != self.reading or self.has_ended:
            return  # asked for behind an end
        if isinstance(found, StreamEnd):
            self.has_ended = True
        else:
            self._came += 1
            if not self.is_passing_over and read.position >= self.start:
                yield from self._gather(found)
            self.has_ended = self._came == self.length(self.reading)
        if self.has_ended and not self.is_passing_over:
            yield from self._close()

    def settle(self, limit: int) -> Iterator[LoadedSegment]:
        """Yield what is gathered if all below ``limit`` has come: nothing more may ever be needed of the stream."""
        if self.is_passing_over or self.is_closed or self._came < max(limit, self._asked):
            return
        if self._elements:
            yield self._cut()
        if self._held is not None:
            yield self._release()
        self._go_on(self._n, self.start)

    # --- segments

    def _gather(self, found: Any) -> Iterator[LoadedSegment]:
        if self._held is not None:  # a further element shows that it is not the stream's last
            yield self._release()
        positioned = found if isinstance(found, Positioned) else Positioned(found, None)
        self._elements.append(owned(positioned.element, always=False))
        self._position = positioned.position
        if self._came == self._stop:
            self._held = self._cut()

    def _close(self) -> Iterator[LoadedSegment]:
        self.is_closed = True
        if self._held is None:
            yield self._cut(is_last=True)
        else:
            held = self._release()
            yield dataclasses.replace(held, segment=dataclasses.replace(held.segment, last_of_epoch=True))

    def _release(self) -> LoadedSegment:
        assert self._held is not None
        held, self._held = self._held, None
        return held

    def _cut(self, *, is_last: bool = False) -> LoadedSegment:
        segment = Segment(
            epoch=self.epoch,
            n=self._n,
            start=self.start,
            stop=self.start + len(self._elements),
            last_of_epoch=is_last,
            stream=self.number,
            num_streams=self._plan.num_streams,
        )
        started_at, began = self._began
        loaded = LoadedSegment(segment, self._elements, started_at, time.perf_counter() - began, self._position)
        self._began = time.time(), time.perf_counter()
        self._elements, self._position = [], None
        self._n, self.start = self._n + 1, segment.stop
        self._stop = self.start + self._size(self._n)
        return loaded
