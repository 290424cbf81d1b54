"""What the ledger's records add up to: how far a loader's contiguous committed prefix reaches, what is awaited. Pure.

``taas_tasks.ledger_reader`` reads the records; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from pydantic import ValidationError

from taas.errors import ObjectCorrupt
from taas_tasks.layout import RunKeys
from taas_tasks.plan import Epochs, epochs_of_plan, num_segments, segment_bounds, segment_of
from taas_tasks.streams import MergedProgress
from taas_tasks.values import LoaderPlan, ShardRecord, Watermark

SegmentId: TypeAlias = tuple[int, int, int]
"""A segment: ``(epoch, stream, n)``."""


# --- one record -----------------------------------------------------------------------------------------------------


def read_record(data: bytes, key: str) -> ShardRecord:
    """Return the record that an object of the ledger holds.

    Raises:
        ObjectCorrupt: It is no record of this version, or one of another segment than ``key`` says.
    """
    try:
        record = ShardRecord.model_validate_json(data)
    except ValidationError as error:
        raise corrupt_record(key, _finding(error)) from None
    nowhere = RunKeys("")
    own = nowhere.ledger_record(record.loader, record.epoch, record.stream, record.n).removeprefix(nowhere.root)
    if not key.endswith(f"/{own}"):
        raise corrupt_record(key, f"the record of another segment, {own!r}")
    return record


def corrupt_record(key: str, found: str) -> ObjectCorrupt:
    """Return the error about an object of the ledger that cannot be what was committed."""
    return ObjectCorrupt(
        f"the ledger's record {key!r} is not what was committed; found {found}. Remove that object, then clear prepare"
        " and train: the segment is prepared again",
        key=key,
    )


def _finding(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else str(first["msg"])


# --- one stream -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frontier:
    """The first segment that the contiguous prefix lacks, where it starts in its epoch, and the units before it."""

    epoch: int = 0
    n: int = 0
    start: int = 0
    units: int = 0
    num_segments: int = 0
    complete: bool = False

    @property
    def segment(self) -> tuple[int, int]:
        """The segment ``(epoch, n)`` that is awaited next."""
        return self.epoch, self.n


def after(frontier: Frontier, record: ShardRecord) -> Frontier:
    """Return the frontier behind ``record``.

    Raises:
        ValueError: The record is not the one that the frontier awaits.
    """
    if (record.epoch, record.n, record.start) != (*frontier.segment, frontier.start) or frontier.complete:
        raise ValueError(
            f"loader {record.loader!r}: the ledger's next record is segment {frontier.n} of epoch {frontier.epoch},"
            f" got segment {record.n} of epoch {record.epoch}; its start is {frontier.start}, got {record.start}"
        )
    moved = replace(
        frontier,
        n=frontier.n + 1,
        start=record.stop,
        units=frontier.units + record.stop - record.start,
        num_segments=frontier.num_segments + 1,
        complete=record.last_of_units,
    )
    return replace(moved, epoch=frontier.epoch + 1, n=0, start=0) if record.last_of_epoch else moved


def fold(records: Iterable[ShardRecord], frontier: Frontier | None = None) -> Frontier:
    """Return how far the contiguous prefix of ``records`` (in any order, holes allowed) reaches."""
    waiting = {(record.epoch, record.n): record for record in records}
    frontier = frontier or Frontier()
    while not frontier.complete and (record := waiting.pop(frontier.segment, None)) is not None:
        frontier = after(frontier, record)
    return frontier


def following(
    plan: LoaderPlan, frontier: Frontier, count: int, *, epochs: Epochs | None = None
) -> list[tuple[int, int]]:
    """Return the next ``count`` segments from the frontier on, as far as the lengths of epochs are known.

    Where they are not known (iterables) the segments are those of the frontier's epoch, which may have fewer.
    ``epochs`` are the plan's, for callers that ask often.
    """
    if frontier.complete:
        return []
    epochs = epochs or epochs_of_plan(plan)
    found: list[tuple[int, int]] = []
    epoch, n = frontier.segment
    while len(found) < count and (epochs.num is None or epoch < epochs.num):
        stop = _segments_of(plan, epochs, epoch)
        upto = n + count - len(found) if stop is None else min(stop, n + count - len(found))
        found += [(epoch, place) for place in range(n, upto)]
        epoch, n = epoch + 1, 0
    return found


def _segments_of(plan: LoaderPlan, epochs: Epochs, epoch: int) -> int | None:
    length = epochs.length_of(epoch)
    return None if length is None else num_segments(plan.sizes, length)


# --- what a reader has, and awaits ----------------------------------------------------------------------------------


class Prefix(Protocol):
    """What has been taken of a loader's ledger, each stream's records in their order, and what is awaited."""

    @property
    def num_segments(self) -> int:
        """Records taken."""

    @property
    def units(self) -> int:
        """The units before the first missing one."""

    @property
    def is_complete(self) -> bool:
        """Whether all units are committed."""

    def awaited(self) -> list[SegmentId]:
        """Return the next segment of every stream that is certain to have one, or may have one."""

    def following(self, awaited: SegmentId, count: int) -> list[SegmentId]:
        """Return ``count`` segments of a stream from the awaited one on, fewer where more cannot be told."""

    def take(self, record: ShardRecord) -> None:
        """Take in an awaited record.

        Raises:
            ValueError: it is not awaited, or starts elsewhere than its predecessor ended.
        """

    def pass_over(self, record: ShardRecord) -> None:
        """Take in that all that comes before ``record`` in its stream of this epoch is committed."""


class OneStreamPrefix:
    """What is taken of the ledger of a loader that is one stream."""

    def __init__(self, plan: LoaderPlan) -> None:
        self._plan = plan
        self._epochs = epochs_of_plan(plan)
        self.frontier = Frontier()

    @property
    def num_segments(self) -> int:
        """Records taken."""
        return self.frontier.num_segments

    @property
    def units(self) -> int:
        """The units before the first missing one."""
        return self.frontier.units

    @property
    def is_complete(self) -> bool:
        """Whether all units are committed."""
        return self.frontier.complete

    def awaited(self) -> list[SegmentId]:
        """Return the segment at the frontier."""
        return [] if self.is_complete else [(self.frontier.epoch, 0, self.frontier.n)]

    def following(self, awaited: SegmentId, count: int) -> list[SegmentId]:
        """Return ``count`` segments from the frontier on, fewer where more cannot be told."""
        return [(epoch, 0, n) for epoch, n in following(self._plan, self.frontier, count, epochs=self._epochs)]

    def take(self, record: ShardRecord) -> None:
        """Take in the record at the frontier; see ``after``."""
        self.frontier = after(self.frontier, record)

    def pass_over(self, record: ShardRecord) -> None:
        """Take in that all of the frontier's epoch that comes before ``record`` is committed."""
        passed = self.frontier
        if record.epoch == passed.epoch:
            units, num = passed.units + record.start - passed.start, passed.num_segments + record.n - passed.n
            self.frontier = replace(passed, n=record.n, start=record.start, units=units, num_segments=num)


class MergedPrefix:
    """What is taken of the ledger of a loader whose workers are its streams.

    A stream is awaited while something of it is certain to be needed. One whose share of that is there may get more
    only when another stream ends early; that end lies in a record of a stream that is awaited.
    """

    def __init__(self, plan: LoaderPlan) -> None:
        self._sizes = plan.sizes
        self._epochs = epochs_of_plan(plan)
        self.merged = MergedProgress(num_streams=plan.num_streams, units=plan.units, epochs=self._epochs)
        self._places = [0] * plan.num_streams  # the epoch that each stream is in
        self._num_segments = 0
        for stream in range(min(plan.num_streams, self._epochs.length or plan.num_streams)):
            self._enter_next(stream)  # epochs in which it has nothing; a stream that has nothing in any stays

    @property
    def num_segments(self) -> int:
        """Records taken, of all streams."""
        return self._num_segments

    @property
    def units(self) -> int:
        """The units before the first missing one of the merged order."""
        return self.merged.units

    @property
    def is_complete(self) -> bool:
        """Whether all units are committed."""
        return self.merged.is_complete

    def awaited(self) -> list[SegmentId]:
        """Return the next segment of every stream of which something is certain to be needed."""
        found = []
        for stream, epoch in enumerate(self._places):
            n, start = self.merged.next_segment(epoch, stream)
            if self.merged.needed(epoch, stream) > start:
                found.append((epoch, stream, n))
        return found

    def following(self, awaited: SegmentId, count: int) -> list[SegmentId]:
        """Return ``count`` segments of a stream, into the next epochs where its lengths are known beforehand."""
        epoch, stream, _ = awaited
        found: list[SegmentId] = []
        while len(found) < count and self._is_within(epoch):
            n, start = self.merged.next_segment(epoch, stream)
            left = self.merged.needed(epoch, stream) - start
            upto = min(n + count - len(found), self._segments_upto(n, left))
            found += [(epoch, stream, place) for place in range(n, upto)]
            if self._epochs.num is None:
                break
            epoch += 1
        return found

    def take(self, record: ShardRecord) -> None:
        """Take in a record of a stream; see ``MergedProgress.add``."""
        epoch, stream = record.epoch, record.stream
        if epoch != self._places[stream]:
            raise ValueError(f"stream {stream} is in epoch {self._places[stream]}, got a segment of epoch {epoch}")
        self.merged.add(epoch, stream, record.n, start=record.start, stop=record.stop, is_last=record.last_of_epoch)
        self._num_segments += 1
        self._enter_next(stream)

    def pass_over(self, record: ShardRecord) -> None:
        """Take in that all of the stream's epoch that comes before ``record`` is committed."""
        self._num_segments += record.n - self.merged.next_segment(record.epoch, record.stream)[0]
        self.merged.pass_over(record.epoch, record.stream, upto=record.n, position=record.start)

    def _enter_next(self, stream: int) -> None:
        while self.merged.has_ended(self._places[stream], stream) and self._is_within(self._places[stream] + 1):
            self._places[stream] += 1

    def _is_within(self, epoch: int) -> bool:
        return self._epochs.num is None or epoch < self._epochs.num

    def _segments_upto(self, n: int, left: int) -> int:
        """Return the segment behind those that hold ``left`` elements from segment ``n`` on, all of their full size."""
        return segment_of(self._sizes, segment_bounds(self._sizes, n)[0] + left - 1) + 1 if left > 0 else n


def prefix_of(plan: LoaderPlan) -> OneStreamPrefix | MergedPrefix:
    """Return what is taken of a loader's ledger before the first record is read."""
    return MergedPrefix(plan) if plan.is_merged else OneStreamPrefix(plan)


def merged_progress(plan: LoaderPlan, records: Iterable[ShardRecord]) -> MergedProgress:
    """Return what ``records`` (in any order, holes allowed) of a merged loader add up to.

    A stream counts up to its first hole, or up to a record that does not follow its predecessor.
    """
    merged = MergedProgress(num_streams=plan.num_streams, units=plan.units, epochs=epochs_of_plan(plan))
    for one in sorted(records, key=lambda one: (one.epoch, one.stream, one.n)):
        if merged.next_segment(one.epoch, one.stream) == (one.n, one.start):
            with suppress(ValueError):  # beyond the known end of its stream: the ledger's readers refuse it
                merged.add(one.epoch, one.stream, one.n, start=one.start, stop=one.stop, is_last=one.last_of_epoch)
    return merged


def watermark(plan: LoaderPlan, prefix: Prefix) -> Watermark:
    """Return how far a ledger reaches, as the value that gate and report read."""
    return Watermark(
        loader=plan.loader,
        units=prefix.units,
        asked=plan.units,
        num_segments=prefix.num_segments,
        complete=prefix.is_complete,
    )


def first_units(plan: LoaderPlan) -> int:
    """Return the units of the first segments: one of each machine, or of each stream."""
    first = plan.sizes.first * (plan.num_streams if plan.is_merged else plan.machines)
    return min(plan.units, plan.inspection.epoch_length or plan.units, first)


def units_per_second(records: Sequence[ShardRecord], *, producers: int) -> float | None:
    """Return the rate at which ``producers`` commit, from the seconds that the latest records took; None without any.

    Producers are the machines, or the streams where the loader's workers are its streams. A low rate is taken (the
    slowest quarter's border), so that what hangs on it does not wait in vain.
    """
    rates = sorted(
        (record.stop - record.start) / max(1e-6, record.committed_at - record.started_at) for record in records
    )
    return rates[len(rates) // 4] * producers if rates else None
