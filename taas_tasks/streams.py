"""How the streams of a loader's K workers become one order: torch's round robin, which drops ended workers. Pure.

Element ``position`` of ``stream`` (what loader worker ``stream`` yields in an epoch, counted from 0) comes before
another one when its position is smaller, or equal with a smaller stream; streams that have ended are left out. That is
the order in which torch's ``DataLoader`` hands out the batches of its workers (``in_order=True``). So an element's
index in the epoch follows from its position and from the lengths of the streams that ended before it.

``Merge`` is one epoch's order; ``MergedProgress`` adds up what is committed of all epochs of a loader.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taas_tasks.plan import LANES, Epochs


@dataclass(frozen=True, slots=True)
class Run:
    """Rounds in which the same streams yield: from ``index`` of the epoch and ``position`` of each stream on."""

    index: int
    position: int
    alive: tuple[int, ...]


class Merge:
    """The order of one epoch of ``num_streams`` streams; ``lengths`` (stream -> length) of those with a known end.

    A stream without a known length counts as endless: what follows from that is right as far as it has got.
    """

    __slots__ = ("_positions", "_starts", "lengths", "num_streams", "runs", "total")

    def __init__(self, num_streams: int, lengths: Mapping[int, int] | None = None) -> None:
        self.num_streams = num_streams
        self.lengths = dict(lengths or {})
        self.runs = tuple(_runs(num_streams, self.lengths))
        self._starts = [run.index for run in self.runs]
        self._positions = [run.position for run in self.runs]
        self.total = sum(self.lengths.values()) if len(self.lengths) == num_streams else None

    def locate(self, index: int) -> tuple[int, int]:
        """Return ``(stream, position)`` of the element at ``index`` of the epoch.

        Raises:
            IndexError: the epoch is known to end before.
        """
        if self.total is not None and index >= self.total:
            raise IndexError(f"element {index} of an epoch with {self.total} elements")
        run = self.runs[bisect_right(self._starts, index) - 1]
        rounds, place = divmod(index - run.index, len(run.alive))
        return run.alive[place], run.position + rounds

    def index_of(self, stream: int, position: int) -> int:
        """Return the index in the epoch of an element of a stream (of the first one that it lacks, at its end)."""
        run = self.runs[bisect_right(self._positions, position) - 1]
        index = run.index + (position - run.position) * len(run.alive) + bisect_left(run.alive, stream)
        return index if self.total is None else min(index, self.total)

    def count_below(self, stream: int, limit: int) -> int:
        """Return how many elements of a stream have an index below ``limit``."""
        if self.total is not None and limit >= self.total:
            return self.lengths[stream]
        run = self.runs[bisect_right(self._starts, limit) - 1]
        rounds, place = divmod(limit - run.index, len(run.alive))
        at = bisect_left(run.alive, stream)
        if run.alive[at : at + 1] != (stream,):
            return self.lengths[stream]  # it has ended before
        return run.position + rounds + (at < place)

    def prefix(self, progress: Sequence[int]) -> int:
        """Return how many elements of the epoch come before the first missing one.

        ``progress[stream]``: how many elements of each stream are there.
        """
        missing = [
            (position, stream) for stream, position in enumerate(progress) if position != self.lengths.get(stream)
        ]
        if not missing:
            return self.total or 0
        position, stream = min(missing)
        return self.index_of(stream, position)


def _runs(num_streams: int, lengths: Mapping[int, int]) -> list[Run]:
    ends = sorted(set(lengths.values()))
    runs: list[Run] = []
    index = position = 0
    for end in [0, *ends]:
        if runs:
            index += (end - position) * len(runs[-1].alive)
        position = end
        alive = tuple(stream for stream in range(num_streams) if lengths.get(stream, end + 1) > end)
        if runs and runs[-1].position == position:
            runs.pop()
        if alive or not runs:
            runs.append(Run(index, position, alive))
    return runs


def lengths_of_streams(num_streams: int, epoch_length: int) -> dict[int, int]:
    """Return the streams' lengths in an epoch whose elements are dealt out one by one (map-style loaders)."""
    return {
        stream: epoch_length // num_streams + (stream < epoch_length % num_streams) for stream in range(num_streams)
    }


# --- where an element lies in its shard ------------------------------------------------------------------------------


def nominal_index(position: int, stream: int, num_streams: int) -> int:
    """Return the index that an element has if no stream ends before it: shards sort elements into lanes by it."""
    return position * num_streams + stream


def lane_period(num_streams: int) -> int:
    """Return after how many positions a stream comes back to a lane."""
    return LANES // math.gcd(num_streams, LANES)


# --- all epochs ------------------------------------------------------------------------------------------------------


@dataclass
class _EpochState:
    progress: list[int]
    next_n: list[int]
    lengths: dict[int, int]
    merge: Merge
    is_known: bool  # the streams' lengths were known beforehand


class MergedProgress:
    """What is committed of a loader of K streams, and what is certain to be needed of each. Not for several threads.

    Args:
        num_streams: K.
        units: the elements asked for; the last epoch is cut there.
        epochs: how the units fall into epochs, as far as it is known beforehand.
    """

    def __init__(self, *, num_streams: int, units: int, epochs: Epochs) -> None:
        self.num_streams = num_streams
        self.units_asked = units
        self._epochs = epochs
        self._states: dict[int, _EpochState] = {}
        self._before = [0]  # units before each epoch, as far as the lengths of epochs are known
        self._num_full = 0  # epochs from the first on of which all is committed

    def add(self, epoch: int, stream: int, n: int, *, start: int, stop: int, is_last: bool) -> None:
        """Take in that segment ``n`` of a stream, [start, stop) of its positions, is committed; each stream's in order.

        Raises:
            ValueError: it is not the one that comes next in its stream, or goes beyond the stream's known end.
        """
        state = self._state(epoch)
        if (n, start) != (state.next_n[stream], state.progress[stream]):
            raise ValueError(
                f"stream {stream} of epoch {epoch}: segment {state.next_n[stream]} from position"
                f" {state.progress[stream]} on comes next, got segment {n} from position {start} on"
            )
        length = state.lengths.get(stream, stop)
        if not start <= stop <= length or (is_last and stop != length):
            raise ValueError(
                f"stream {stream} of epoch {epoch} has {length} elements, got a segment from position {start} to {stop}"
            )
        state.next_n[stream], state.progress[stream] = n + 1, stop
        if is_last and not state.is_known:
            state.lengths[stream] = stop
            state.merge = Merge(self.num_streams, state.lengths)

    def pass_over(self, epoch: int, stream: int, *, upto: int, position: int) -> None:
        """Take in that the segments of a stream before ``upto``, the positions before ``position``, are committed."""
        state = self._state(epoch)
        state.next_n[stream], state.progress[stream] = upto, position

    def merge(self, epoch: int) -> Merge:
        """Return the order of an epoch, as far as it is known."""
        return self._state(epoch).merge

    def next_segment(self, epoch: int, stream: int) -> tuple[int, int]:
        """Return ``(n, start)`` of the segment that comes next in a stream."""
        state = self._state(epoch)
        return state.next_n[stream], state.progress[stream]

    def has_ended(self, epoch: int, stream: int) -> bool:
        """Return whether all that a stream has in an epoch is committed."""
        state = self._state(epoch)
        return state.lengths.get(stream) == state.progress[stream]

    def prefix(self, epoch: int) -> int:
        """Return the elements of an epoch before its first missing one, cut where the units end."""
        state = self._state(epoch)
        prefix, limit = state.merge.prefix(state.progress), self._limit(epoch)
        return prefix if limit is None else min(prefix, limit)

    def epoch_length(self, epoch: int) -> int | None:
        """Return the length of an epoch, cut where the units end; None while it is not known."""
        limit = self._limit(epoch)
        if limit is None:
            return None
        total = self._state(epoch).merge.total
        if total is not None:
            return min(total, limit)
        return limit if self.prefix(epoch) >= limit else None

    def units_before(self, epoch: int) -> int | None:
        """Return the units of all epochs before one; None while it is not known. Never more than are asked for."""
        while len(self._before) <= epoch and self._before[-1] < self.units_asked:
            length = self.epoch_length(len(self._before) - 1)
            if length is None:
                return None
            self._before.append(self._before[-1] + length)
        return self._before[min(epoch, len(self._before) - 1)]

    def needed(self, epoch: int, stream: int) -> int:
        """Return how many elements of a stream are certain to be needed, by what is known of the others' ends."""
        limit = self._limit(epoch)
        return 0 if limit is None else self._state(epoch).merge.count_below(stream, limit)

    @property
    def units(self) -> int:
        """The units before the first missing one."""
        while (length := self.epoch_length(self._num_full)) and self.prefix(self._num_full) == length:
            self._num_full += 1
        return (self.units_before(self._num_full) or 0) + self.prefix(self._num_full)

    @property
    def is_complete(self) -> bool:
        """Whether all units are committed."""
        return self.units >= self.units_asked

    @property
    def num_epochs(self) -> int | None:
        """Epochs in all, the last, partial one included; None while it is not known."""
        if self._epochs.num is not None:
            return self._epochs.num
        return self._num_full if self.is_complete else None

    def _limit(self, epoch: int) -> int | None:
        before = self.units_before(epoch)
        return None if before is None else self.units_asked - before

    def _state(self, epoch: int) -> _EpochState:
        if epoch not in self._states:
            length = self._epochs.length_of(epoch) if self._is_within(epoch) else None
            lengths = {} if length is None else lengths_of_streams(self.num_streams, length)
            zeros = [0] * self.num_streams
            self._states[epoch] = _EpochState(
                list(zeros), list(zeros), lengths, Merge(self.num_streams, lengths), is_known=length is not None
            )
        return self._states[epoch]

    def _is_within(self, epoch: int) -> bool:
        return self._epochs.num is None or epoch < self._epochs.num
