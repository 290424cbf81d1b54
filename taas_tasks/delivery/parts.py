"""Which part of a segment a host needs, and where it lies in the cache file. Pure.

At step t of a pass that began at ``offset``, rank r takes element ``offset + t * world_size + r`` of the epoch. Where
one stream is the epoch, the lanes (index mod 32) that a rank or a host needs follow from the offset alone, for every
segment. In a merged loader they follow from the epoch's ``Merge``: between the ends of streams a stream's elements go
round the ranks and round the lanes with a common period.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from taas_tasks.shards.lanes import NUM_LANES, lane_of
from taas_tasks.streams import Merge, lane_period, nominal_index
from taas_tasks.values import ShardRecord

_ALIGNMENT = 64
_BRIDGE_BYTES = 1 << 16  # are read sooner than another range is asked for


@cache
def _lanes(first: int, count: int, world_size: int, offset: int) -> int:
    found = 0
    for turn in range(NUM_LANES):
        for rank in range(first, first + count):
            found |= 1 << lane_of(offset + turn * world_size + rank)
    return found


@lru_cache(maxsize=4096)
def _lanes_of_run(ranks: Ranks, lane: int, rank: int, num_streams: int, stride: int, count: int) -> int:
    """Return the lanes of those of ``count`` elements of a stream that these ranks take.

    The first one lies in ``lane`` and is taken by ``rank``; in the epoch they stand ``stride`` apart.
    """
    found = 0
    for turn in range(count):
        if ranks.first <= (rank + turn * stride) % ranks.world_size < ranks.first + ranks.count:
            found |= 1 << lane_of(lane + turn * num_streams)
    return found


@dataclass(frozen=True)
class Ranks:
    """The ranks of one host among all."""

    first: int
    count: int
    world_size: int

    def lanes(self, offset: int) -> int:
        """Return the lanes that these ranks need in a pass from ``offset`` on, as bits of a number."""
        return _lanes(self.first, self.count, self.world_size, offset % NUM_LANES)

    def merged_lanes(self, merge: Merge, stream: int, *, start: int, stop: int, offset: int) -> int:
        """Return the same for the positions [start, stop) of a stream; 0 when these ranks take none of them."""
        found = 0
        for run, next_run in zip(merge.runs, [*merge.runs[1:], None], strict=True):
            low, high = max(start, run.position), stop if next_run is None else min(stop, next_run.position)
            if low >= high or stream not in run.alive:
                continue
            stride = len(run.alive)
            index = run.index + (low - run.position) * stride + run.alive.index(stream)
            period = math.lcm(lane_period(merge.num_streams), self.world_size // math.gcd(stride, self.world_size))
            lane = lane_of(nominal_index(low, stream, merge.num_streams))
            rank = (index - offset) % self.world_size
            found |= _lanes_of_run(
                self, lane, rank, merge.num_streams % NUM_LANES, stride % self.world_size, min(high - low, period)
            )
        return found


@dataclass(frozen=True, slots=True)
class LaneBytes:
    """Where a lane lies in its object."""

    lane: int
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Segment:
    """What a feeder keeps of a ``ShardRecord``: under 1 KB, as it keeps those of the whole run.

    ``num_streams`` is that of a merged loader, else 1; then elements [start, stop) are positions of ``stream``.
    """

    loader: str
    epoch: int
    stream: int
    num_streams: int
    n: int
    start: int
    stop: int
    padded_stop: int
    last_of_epoch: bool
    last_of_units: bool
    key: str
    schema_length: int
    schema_crc32: int
    lane_table: array[int]

    @classmethod
    def of(cls, record: ShardRecord, *, num_streams: int = 1) -> Segment:
        """Return the segment of a ledger record of a loader with so many streams."""
        table = array("q", [part for one in record.lanes for part in (one.lane, one.offset, one.length, one.crc32)])
        return cls(
            loader=record.loader,
            epoch=record.epoch,
            stream=record.stream,
            num_streams=num_streams,
            n=record.n,
            start=record.start,
            stop=record.stop,
            padded_stop=record.stop + record.num_padding,
            last_of_epoch=record.last_of_epoch,
            last_of_units=record.last_of_units,
            key=record.key,
            schema_length=record.schema_length,
            schema_crc32=record.schema_crc32,
            lane_table=table,
        )

    def lanes(self, bits: int) -> list[LaneBytes]:
        """Return those lanes whose bits are set, in the order of the file."""
        table = self.lane_table
        return [LaneBytes(*table[at : at + 4]) for at in range(0, len(table), 4) if bits >> table[at] & 1]

    def num_elements(self, bits: int) -> int:
        """Return how many elements these lanes hold, without padding."""
        period, count = lane_period(self.num_streams), self.stop - self.start
        lanes = [lane_of(nominal_index(self.start + row, self.stream, self.num_streams)) for row in range(period)]
        return sum(len(range(first, count, period)) for first, lane in enumerate(lanes) if bits >> lane & 1)


def lanes_of(bits: int) -> list[int]:
    """Return the lanes whose bits are set."""
    return [lane for lane in range(NUM_LANES) if bits >> lane & 1]


class PartKey(NamedTuple):
    """A part of a segment: the lanes of it (bits of a number) that a host needs."""

    loader: str
    epoch: int
    stream: int
    n: int
    lanes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, start + length) of the object, which stand at ``place`` of the cache file."""

    start: int
    length: int
    place: int


@dataclass(frozen=True, slots=True)
class PartLayout:
    """What to read of an object and where to put it: the schema comes first; ``lanes`` are (lane, place, length)."""

    spans: tuple[Span, ...]
    lanes: tuple[tuple[int, int, int], ...]
    num_bytes: int


def lay_out(segment: Segment, bits: int, *, bridge_bytes: int = _BRIDGE_BYTES) -> PartLayout:
    """Return how the schema and some lanes of a segment lie in a cache file: as few ranges as there can be.

    Up to ``bridge_bytes`` that nobody wants are read to save a range, such as the empty lanes of other streams.
    """
    wanted = segment.lanes(bits)
    spans: list[Span] = []
    for start, length in [(0, segment.schema_length), *((one.offset, one.length) for one in wanted)]:
        last = spans[-1] if spans else None
        if last is not None and start - last.start - last.length <= bridge_bytes:
            spans[-1] = Span(last.start, start + length - last.start, last.place)
        else:
            spans.append(Span(start, length, _aligned(last.place + last.length) if last else 0))
    lanes = tuple((one.lane, _place(spans, one.offset), one.length) for one in wanted)
    return PartLayout(tuple(spans), lanes, spans[-1].place + spans[-1].length)


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _place(spans: list[Span], start: int) -> int:
    span = next(span for span in spans if span.start <= start < span.start + span.length)
    return span.place + start - span.start


def describe_part(segment: Segment, bits: int, layout: PartLayout) -> dict[str, Any]:
    """Return what a rank is told of a part, beside the file."""
    return {
        "epoch": segment.epoch,
        "stream": segment.stream,
        "n": segment.n,
        "lane_bits": bits,
        "start": segment.start,
        "stop": segment.stop,
        "padded_stop": segment.padded_stop,
        "schema_length": segment.schema_length,
        "lanes": layout.lanes,
    }
