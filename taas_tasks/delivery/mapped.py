"""A part of a segment as a rank has it: mapped privately into the process, its elements views of the mapping."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from itertools import cycle, takewhile
from typing import Any, TypeAlias

from taas.errors import DeliveryError
from taas_tasks.shards.lanes import lane_of
from taas_tasks.shards.reader import ShardSchema, read_lane, read_schema
from taas_tasks.streams import lane_period, nominal_index

Row: TypeAlias = tuple[Callable[[int], Any], int]
"""An element to be: a lane's function from a row to the element, and the row."""


class MappedPart:
    """A part in this process. It is mapped once, when first read; closing it keeps the mapping for living elements.

    Args:
        told: what ``parts.describe_part`` said.
        file: descriptor of the cache file; the part closes it.
        num_streams: of a merged loader, else 1.
        allow_pickle: see ``read_schema``.
    """

    def __init__(self, told: dict[str, Any], file: int, *, num_streams: int, allow_pickle: bool) -> None:
        self.epoch, self.stream, self.n, self.lane_bits = told["epoch"], told["stream"], told["n"], told["lane_bits"]
        self.start, self.stop = told["start"], told["padded_stop"]
        self.num_bytes = 0
        self._num_streams, self._period = num_streams, lane_period(num_streams)
        self._places = {lane: (place, length) for lane, place, length in told["lanes"]}
        self._schema: ShardSchema = read_schema(os.pread(file, told["schema_length"], 0), allow_pickle=allow_pickle)
        self._lanes: dict[int, Callable[[int], Any]] = {}
        self._file = file
        self._mapping: memoryview | None = None

    def holds(self, position: int) -> bool:
        """Whether the element at a position of the stream is in this part."""
        return self.start <= position < self.stop and self._lane_of(position) in self._places

    def rows(self, positions: range) -> list[Row]:
        """Return where the elements at ascending positions of the stream are, up to the first that is not held here."""
        held = positions[: len(range(positions.start, min(positions.stop, self.stop), positions.step))]
        period = self._period // math.gcd(self._period, positions.step)  # after so many a lane comes again
        lanes = [self._lane(position) for position in takewhile(self.holds, held[:period])]
        held = held[: None if len(lanes) == period else len(lanes)]
        start, rows_apart = self.start, self._period
        return list(zip(cycle(lanes), [(position - start) // rows_apart for position in held]))

    def _lane_of(self, position: int) -> int:
        return lane_of(nominal_index(position, self.stream, self._num_streams))

    def _lane(self, position: int) -> Callable[[int], Any]:
        number = self._lane_of(position)
        return self._lanes.get(number) or self._open(number, position)

    def _open(self, number: int, position: int) -> Callable[[int], Any]:
        place, length = self._places[number]
        if self._mapping is None:
            self._mapping = self._map()
        lane = read_lane(self._mapping[place : place + length], self._schema)
        row, expected = (position - self.start) // self._period, nominal_index(position, self.stream, self._num_streams)
        num_rows = len(range(position - row * self._period, self.stop, self._period))
        if not (num_rows == len(lane) and lane.index(row) == expected):
            found = (
                f"element {lane.index(row)}" if num_rows == len(lane) else f"{len(lane)} elements, not {num_rows}, and"
            )
            raise DeliveryError(
                f"lane {number} of segment {self.n} of epoch {self.epoch} (stream {self.stream}) has {found} where "
                f"element {expected} should be in row {row}: the shard was written by other rules than its ledger "
                "record; prepare and train with the same release"
            )
        self.num_bytes += length
        self._lanes[number] = lane.get
        return self._lanes[number]

    def _map(self) -> memoryview:
        num_bytes = max(place + length for place, length in self._places.values())
        try:
            mapping = mmap.mmap(self._file, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise DeliveryError(
                f"segment {self.n} of epoch {self.epoch} cannot be mapped: {error.strerror}. An element that is kept "
                "keeps its segment mapped, which costs a file descriptor: keep copies (clone() of tensors), or raise "
                "the limit (ulimit -n)"
            ) from error
        return memoryview(mapping)

    def close(self) -> None:
        """Let go of the file; elements that are still alive keep its mapping."""
        self._mapping = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
