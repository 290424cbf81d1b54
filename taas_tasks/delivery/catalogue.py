"""What a host knows of one loader: its committed segments, where elements lie, how far the order is there. No I/O.

A loader that is not merged has one stream, and positions of that stream are indices of the (padded) epoch.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from taas.errors import DeliveryError
from taas_tasks.delivery.parts import PartKey, Ranks, Segment
from taas_tasks.plan import epochs_of_plan
from taas_tasks.streams import MergedProgress
from taas_tasks.values import LoaderPlan

_MAX_LANES = 4096


@dataclass
class _Stream:
    """The segments of one stream in an epoch that hold elements, in order."""

    segments: list[Segment] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.starts.append(segment.start)

    def place_of(self, position: int) -> int:
        """Return which segment holds a position; behind the last one where none does."""
        place = max(0, bisect_right(self.starts, position) - 1)
        return place + (place < len(self.segments) and position >= self.segments[place].padded_stop)


@dataclass
class _Epoch:
    streams: list[_Stream]
    lanes: dict[tuple[int, int, int], int] = field(default_factory=dict)  # by stream, n and offset, as far as known


class Catalogue:
    """The committed segments of one loader, as one host takes them. Not for several threads at once."""

    def __init__(self, plan: LoaderPlan, ranks: Ranks) -> None:
        self._plan = plan
        self._ranks = ranks
        self._epochs: list[_Epoch] = []
        self._progress = MergedProgress(num_streams=plan.num_streams, units=plan.units, epochs=epochs_of_plan(plan))

    def add(self, segment: Segment) -> None:
        """Take in a committed segment; those of a stream come in its order.

        Raises:
            DeliveryError: its stream ended elsewhere than the plan says, or another segment comes next.
        """
        while len(self._epochs) <= segment.epoch:
            self._epochs.append(_Epoch([_Stream() for _ in range(self._plan.num_streams)]))
        epoch = self._epochs[segment.epoch]
        try:
            self._progress.add(
                *(segment.epoch, segment.stream, segment.n),
                start=segment.start,
                stop=segment.stop,
                is_last=segment.last_of_epoch,
            )
        except ValueError as error:
            raise DeliveryError(
                f"the records of loader '{segment.loader}' do not fit its plan: {error}. The loader yielded other "
                "elements than its sampler says; prepare it again"
            ) from error
        if segment.padded_stop > segment.start:
            epoch.streams[segment.stream].add(segment)
        if segment.last_of_epoch:
            epoch.lanes.clear()  # the other streams' elements now go to other ranks

    # --- the order ------------------------------------------------------------------------------------------------

    def reach(self, epoch: int) -> int:
        """Return how many elements of an epoch are there before the first missing one."""
        return self._progress.prefix(epoch)

    def epoch_length(self, epoch: int) -> int | None:
        """Return the length of an epoch; None while it is not known."""
        return self._progress.epoch_length(epoch)

    @property
    def num_epochs(self) -> int | None:
        """How many epochs there are; None while it is not known."""
        return self._progress.num_epochs

    def describe_reach(self, epoch: int) -> dict[str, Any]:
        """Return what a rank is told of an epoch whose length only the reading shows."""
        told: dict[str, Any] = {"reach": self.reach(epoch)}
        if self._plan.is_merged:
            told["lengths"] = list(self._progress.merge(epoch).lengths.items())
        length = self.epoch_length(epoch)
        if length is not None:
            told["epoch_length"] = told["padded_length"] = length
            if not self._plan.is_merged and self._is_whole(epoch):
                told["padded_length"] = self._epochs[epoch].streams[0].segments[-1].padded_stop
        return told

    def positions_at(self, epoch: int, index: int) -> list[tuple[int, int]]:
        """Return each stream with the position of its first element from ``index`` of the epoch on."""
        if not self._plan.is_merged:
            return [(0, index)]
        merge = self._progress.merge(epoch)
        run = next(one for one in reversed(merge.runs) if one.index <= index)
        rounds, place = divmod(index - run.index, max(1, len(run.alive)))
        return [(stream, run.position + rounds + (at < place)) for at, stream in enumerate(run.alive)]

    # --- parts ----------------------------------------------------------------------------------------------------

    def find(self, epoch: int, stream: int, position: int) -> Segment | None:
        """Return the segment that holds an element, if it is committed."""
        if epoch >= len(self._epochs):
            return None
        known = self._epochs[epoch].streams[stream]
        place = known.place_of(position)
        return known.segments[place] if place < len(known.segments) else None

    def part(self, segment: Segment, offset: int) -> PartKey:
        """Return the part of a segment that this host needs in a pass from ``offset`` on, as far as is known now."""
        return PartKey(segment.loader, segment.epoch, segment.stream, segment.n, self._lanes(segment, offset))

    def _lanes(self, segment: Segment, offset: int) -> int:
        if not self._plan.is_merged:
            return self._ranks.lanes(offset)
        known, place = self._epochs[segment.epoch].lanes, (segment.stream, segment.n, offset)
        if place not in known:
            if len(known) >= _MAX_LANES:
                known.clear()
            merge = self._progress.merge(segment.epoch)
            bounds = {"start": segment.start, "stop": segment.stop}
            known[place] = self._ranks.merged_lanes(merge, segment.stream, **bounds, offset=offset)
        return known[place]

    def places_of(self, epoch: int, positions: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Return ``(stream, place of its segment)`` for streams and positions in them: where a walk begins."""
        if epoch >= len(self._epochs):
            return tuple((stream, 0) for stream, _ in positions)
        streams = self._epochs[epoch].streams
        return tuple((stream, streams[stream].place_of(position)) for stream, position in positions)

    def walk(self, epoch: int, places: Iterable[tuple[int, int]], offset: int) -> Iterator[tuple[PartKey, Segment]]:
        """Yield the parts that will be needed, from some places on, the nearest first; then those of later epochs."""
        while epoch < len(self._epochs):
            for _, _, segment in self._in_order(epoch, places):
                key = self.part(segment, offset)
                if key.lanes:
                    yield key, segment
            if not self._is_whole(epoch):
                return
            epoch, offset, places = epoch + 1, 0, [(stream, 0) for stream in range(self._plan.num_streams)]

    def _in_order(self, epoch: int, places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, Segment]]:
        frontier = self._frontier(epoch)
        walks = [self._in_stream(epoch, stream, place, frontier) for stream, place in places]
        return iter(walks[0]) if len(walks) == 1 else heapq.merge(*walks, key=lambda one: one[:2])

    def _in_stream(self, epoch: int, stream: int, place: int, frontier: float) -> Iterator[tuple[int, int, Segment]]:
        """Yield a stream's segments with what they are ordered by; one at most that begins behind the frontier.

        What lies further behind is of use only when the streams that lag have caught up.
        """
        segments = self._epochs[epoch].streams[stream].segments
        for at in range(place, len(segments)):
            yield segments[at].start, stream, segments[at]
            if segments[at].start > frontier:
                return

    def _frontier(self, epoch: int) -> float:
        """Return the position of the first element that is missing in a merged epoch."""
        if not self._plan.is_merged:
            return math.inf
        progress = self._progress
        open_streams = [one for one in range(self._plan.num_streams) if not progress.has_ended(epoch, one)]
        return min((progress.next_segment(epoch, one)[1] for one in open_streams), default=math.inf)

    def _is_whole(self, epoch: int) -> bool:
        """Whether all of an epoch is committed."""
        return epoch < len(self._epochs) and self.epoch_length(epoch) == self.reach(epoch)
