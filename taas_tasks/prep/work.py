"""What a machine works on next: its own segments first, and the lowest missing one of a machine that lags."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from taas_tasks.plan import (
    Epochs,
    epochs_of_plan,
    helper_of,
    owner_of,
    padding_of,
    segment_bounds,
    segments_in_order,
)
from taas_tasks.prep.commit import Segment
from taas_tasks.prep.progress import Progress, SegmentId
from taas_tasks.values import LoaderPlan

_log = logging.getLogger(__name__)
_LAGGING_ROUNDS = 4
_WINDOW = 64


def segment_at(plan: LoaderPlan, epochs: Epochs, segment: SegmentId) -> Segment:
    """Return a segment of a loader whose epochs' lengths are known, with its padding if it is its epoch's last."""
    epoch, n = segment
    length = epochs.length_of(epoch) or 0
    start, stop = segment_bounds(plan.sizes, n)
    is_last = stop >= length
    return Segment(
        epoch=epoch,
        n=n,
        start=start,
        stop=min(stop, length),
        padding=tuple(place % length for place in range(padding_of(length))) if is_last else (),
        last_of_epoch=is_last,
        last_of_units=is_last and epoch + 1 == epochs.num,
    )


@dataclass(frozen=True)
class Pace:
    """How patient a machine is. ``refresh_s``: how old its view of the ledger may be; ``patience_s``: how long a
    segment of another machine may stay missing, without that machine committing anything, before it is redone.
    ``lost_s``: how long nothing may come for a machine that waits before it looks whether records are lost."""

    refresh_s: float = 2.0
    patience_s: float = 5.0
    poll_s: float = 0.5
    lost_s: float = 30.0


class Work:
    """Hands out the segments of one machine. Nothing is claimed: the ledger alone decides whose result counts."""

    def __init__(
        self, plan: LoaderPlan, progress: Progress, *, machine: int, clock: Callable[[], float], pace: Pace
    ) -> None:
        self._plan = plan
        self._epochs = epochs_of_plan(plan)
        self._progress = progress
        self._machine = machine
        self._clock = clock
        self._pace = pace
        self._taken: set[SegmentId] = set()
        self._refreshed_at = clock()
        self._patience_s = pace.patience_s
        self._waiting_for: dict[int, tuple[SegmentId, float]] = {}
        self._offered_at: dict[SegmentId, float] = {}
        self.num_skipped = 0

    def own(self) -> Iterator[Segment]:
        """Yield this machine's missing segments in order; in between one of a machine that lags rounds behind."""
        for segment in segments_in_order(self._plan):
            if owner_of(*segment, machines=self._plan.machines) != self._machine:
                continue
            self._refresh()
            if self._progress.has(segment):
                self.num_skipped += 1
                continue
            lagging = self._lagging(segment)
            if lagging is not None:
                yield self._take(lagging)
            yield self._take(segment)

    def to_redo(self) -> Segment | None:
        """Return a segment to redo when all own ones are done: the lowest that a stalled machine leaves to this one.

        Machines take turns: the first helper of a segment at once, the second after another patience, and so on.
        """
        self._progress.refresh()
        missing = self._progress.missing(_WINDOW)
        stalled = self._stalled_owners(missing)
        for segment in missing:
            if segment in self._taken or owner_of(*segment, machines=self._plan.machines) not in stalled:
                continue
            offered_at = self._offered_at.setdefault(segment, self._clock())
            turns = 1 + int((self._clock() - offered_at) / self._patience_s)
            if self._is_helper(segment, turns):
                _log.info("redoing segment %d of epoch %d, whose machine lags", segment[1], segment[0])
                return self._take(segment)
        return None

    def note_seconds(self, seconds: float) -> None:
        """Take in what a segment took here: others are given three times as long before they count as stalled."""
        self._patience_s = max(self._patience_s, 3 * seconds)

    def _take(self, segment: SegmentId) -> Segment:
        self._taken.add(segment)
        return segment_at(self._plan, self._epochs, segment)

    def _refresh(self) -> None:
        if self._plan.machines > 1 and self._clock() - self._refreshed_at >= self._pace.refresh_s:
            self._progress.refresh()
            self._refreshed_at = self._clock()

    def _lagging(self, own: SegmentId) -> SegmentId | None:
        """Return the lowest missing segment if it lags so many rounds behind ``own`` that it is this machine's turn."""
        lowest = self._progress.frontier
        if lowest is None or lowest in self._taken or self._plan.machines == 1:
            return None
        round_units = self._plan.machines * self._plan.sizes.largest
        turns = int((self._units_before(own) - self._units_before(lowest)) / round_units / _LAGGING_ROUNDS)
        return lowest if self._is_helper(lowest, turns) else None

    def _is_helper(self, segment: SegmentId, turns: int) -> bool:
        machines = self._plan.machines
        helpers = (helper_of(*segment, machines=machines, turn=turn) for turn in range(min(turns, machines - 1)))
        return self._machine in helpers

    def _units_before(self, segment: SegmentId) -> int:
        epoch, n = segment
        return (self._epochs.start_of(epoch) or 0) + segment_bounds(self._plan.sizes, n)[0]

    def _stalled_owners(self, missing: list[SegmentId]) -> set[int]:
        """Return the other machines that have committed nothing of their own for too long."""
        lowest: dict[int, SegmentId] = {}
        for segment in missing:
            lowest.setdefault(owner_of(*segment, machines=self._plan.machines), segment)
        lowest.pop(self._machine, None)
        now = self._clock()
        for owner, segment in lowest.items():
            before, since = self._waiting_for.get(owner, (segment, now))
            moved_on = before != segment and self._progress.machine_of(before) == owner
            self._waiting_for[owner] = (segment, now if moved_on else since)
        return {owner for owner in lowest if now - self._waiting_for[owner][1] >= self._patience_s}
