"""What the ledger's records add up to: how far a loader's contiguous committed prefix reaches. Pure.

``taas_tasks.ledger_reader`` reads the records; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from taas_tasks.plan import Epochs, epochs_of_plan, num_segments
from taas_tasks.values import LoaderPlan, ShardRecord, Watermark


@dataclass(frozen=True)
class Frontier:
    """The first segment that the contiguous prefix lacks, and the units before it."""

    epoch: int = 0
    n: int = 0
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
    if (record.epoch, record.n) != frontier.segment or frontier.complete:
        raise ValueError(
            f"loader {record.loader!r}: the ledger's next record is segment {frontier.n} of epoch {frontier.epoch},"
            f" got segment {record.n} of epoch {record.epoch}"
        )
    moved = replace(
        frontier,
        n=frontier.n + 1,
        units=frontier.units + record.stop - record.start,
        num_segments=frontier.num_segments + 1,
        complete=record.last_of_units,
    )
    return replace(moved, epoch=frontier.epoch + 1, n=0) if record.last_of_epoch else moved


def fold(records: Iterable[ShardRecord], frontier: Frontier | None = None) -> Frontier:
    """Return how far the contiguous prefix of ``records`` (in any order, holes allowed) reaches."""
    waiting = {(record.epoch, record.n): record for record in records}
    frontier = frontier or Frontier()
    while not frontier.complete and (record := waiting.pop(frontier.segment, None)) is not None:
        frontier = after(frontier, record)
    return frontier


def watermark(plan: LoaderPlan, frontier: Frontier) -> Watermark:
    """Return the frontier as the value that gate and report read."""
    return Watermark(
        loader=plan.loader,
        units=frontier.units,
        asked=plan.units,
        num_segments=frontier.num_segments,
        complete=frontier.complete,
    )


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


def first_units(plan: LoaderPlan) -> int:
    """Return the units of the first segments: one of each machine."""
    return min(plan.units, plan.inspection.epoch_length or plan.units, plan.sizes.first * plan.machines)


def units_per_second(records: Sequence[ShardRecord], *, machines: int) -> float | None:
    """Return the rate at which ``machines`` commit, from the seconds that the latest records took; None without any.

    A low rate is taken (the slowest quarter's border), so that what hangs on it does not wait in vain.
    """
    rates = sorted(
        (record.stop - record.start) / max(1e-6, record.committed_at - record.started_at) for record in records
    )
    return rates[len(rates) // 4] * machines if rates else None
