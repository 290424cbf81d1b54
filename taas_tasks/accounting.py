"""The accounting of a run: every prepared element is consumed, dropped by the rule, or unread for a reason. Pure.

Which elements a rank took follows from its passes: in a pass with offset ``o`` it took, at step ``t``, element
``o + t * world_size + rank`` of the epoch. Elements at and behind the epoch's length are padding. So the elements of
one epoch with the same remainder modulo ``world_size`` are counted as intervals of ``t``; nothing is enumerated.

It is the same for a loader whose workers are its streams: an index is a place in the merged order, an epoch is as long
as its streams together, and its end is there when all of them have ended or the units have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from taas_tasks.ledger import merged_progress
from taas_tasks.result_values import RankPass
from taas_tasks.values import LoaderAccount, LoaderPlan, ShardRecord

Remainder = Literal["pad", "drop"]


@dataclass(frozen=True)
class _Epoch:
    number: int
    length: int
    is_whole: bool


@dataclass(frozen=True)
class _EpochCount:
    """What became of one epoch: distinct real elements read, distinct padding read, and reads beyond the first."""

    real: int
    padding: int
    repeated: int
    dropped: int
    unread: int
    reasons: tuple[str, ...]


def _epochs(loader: LoaderPlan, records: Sequence[ShardRecord]) -> list[_Epoch]:
    lengths: dict[int, int] = defaultdict(int)
    for record in records:
        lengths[record.epoch] += record.stop - record.start
    whole = _whole_epochs(loader, records)
    return [_Epoch(number, length, number in whole) for number, length in sorted(lengths.items())]


def _whole_epochs(loader: LoaderPlan, records: Sequence[ShardRecord]) -> set[int]:
    """Return the epochs whose end is committed; the end of the units is one."""
    if not loader.is_merged:
        return {record.epoch for record in records if record.last_of_epoch}
    merged = merged_progress(loader, records)
    numbers = {record.epoch for record in records}
    return {epoch for epoch in numbers if merged.epoch_length(epoch) == merged.prefix(epoch)}


def _merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _covered(intervals: Iterable[tuple[int, int]], *, below: int) -> int:
    return sum(max(0, min(stop, below) - start) for start, stop in intervals)


def _read(passes: Iterable[RankPass], *, length: int, world_size: int) -> tuple[int, int, int]:
    """Return (distinct real, distinct padding, repeated) elements that the passes over one epoch read."""
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for one in passes:
        first, remainder = divmod(one.offset + one.rank, world_size)
        taken[remainder].append((first, first + one.num_steps))
    real = distinct = total = 0
    for remainder, intervals in taken.items():
        merged = _merged(intervals)
        num_real = max(0, -(-(length - remainder) // world_size))
        real += _covered(merged, below=num_real)
        distinct += sum(stop - start for start, stop in merged)
        total += sum(stop - start for start, stop in intervals)
    return real, distinct - real, total - distinct


def expected_steps(length: int, *, offset: int, world_size: int, remainder: Remainder) -> int:
    """Return the steps that every rank makes in a pass over an epoch of ``length`` elements from ``offset`` on."""
    left = max(0, length - offset)
    return left // world_size if remainder == "drop" else -(-left // world_size)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({ranks[0]}..{ranks[-1]})"


def _reasons(epoch: _Epoch, passes: Sequence[RankPass], *, world_size: int, remainder: Remainder) -> list[str]:
    """Say why elements of the epoch stayed unread; empty when nothing explains it."""
    if not passes:
        return [f"epoch {epoch.number} ({epoch.length} elements) was not read: training made no pass over it"]
    by_rank: dict[int, list[RankPass]] = defaultdict(list)
    for one in passes:
        by_rank[one.rank].append(one)
    reasons = []
    if absent := [rank for rank in range(world_size) if rank not in by_rank]:
        reasons.append(f"epoch {epoch.number}: {_ranks(absent)} did not iterate")
    offset = min(one.offset for one in passes)
    steps = expected_steps(epoch.length, offset=offset, world_size=world_size, remainder=remainder)
    goal = offset + steps * world_size
    early = sorted(
        rank for rank, own in by_rank.items() if _stopped_early(own, offset=offset, goal=goal, world_size=world_size)
    )
    if early:
        reasons.append(f"epoch {epoch.number}: {_ranks(early)} stopped before the end of the pass ({steps} steps)")
    if offset:
        reasons.append(f"epoch {epoch.number}: training resumed at element {offset}")
    return reasons


def _stopped_early(passes: Sequence[RankPass], *, offset: int, goal: int, world_size: int) -> bool:
    """Return whether one rank's passes leave a part unread because one of them was broken off before it."""
    reached, is_broken_off = offset, False
    for one in sorted(passes, key=lambda one: one.offset):
        if one.offset > reached:
            break
        reached = max(reached, one.offset + one.num_steps * world_size)
        is_broken_off = is_broken_off or not one.complete
    return is_broken_off and reached < goal


def _count(epoch: _Epoch, passes: Sequence[RankPass], *, world_size: int, remainder: Remainder) -> _EpochCount:
    real, padding, repeated = _read(passes, length=epoch.length, world_size=world_size)
    offset = min((one.offset for one in passes), default=0)
    dropped = (epoch.length - offset) % world_size if remainder == "drop" and epoch.is_whole else 0
    dropped = min(dropped, epoch.length - real)
    unread = epoch.length - real - dropped
    reasons = _reasons(epoch, passes, world_size=world_size, remainder=remainder) if unread else []
    return _EpochCount(real, padding, repeated, dropped, unread, tuple(reasons))


def _uneven(passes: Iterable[RankPass]) -> list[str]:
    """Name epochs whose complete passes had different numbers of steps: a broken promise, never explained."""
    steps: dict[tuple[int, int], set[int]] = defaultdict(set)
    for one in passes:
        if one.complete:
            steps[one.epoch, one.offset].add(one.num_steps)
    return [
        f"epoch {epoch}: ranks made different numbers of steps in complete passes: {sorted(found)}"
        for (epoch, _), found in sorted(steps.items())
        if len(found) > 1
    ]


def _per_rank(passes: Iterable[RankPass]) -> dict[str, Any]:
    """Return per rank its elements: at step t of a pass, ``offset + t * world_size + rank`` of the epoch."""
    ranks: dict[int, list[RankPass]] = defaultdict(list)
    for one in sorted(passes, key=lambda one: (one.rank, one.number)):
        ranks[one.rank].append(one)
    return {
        str(rank): {
            "consumed": sum(one.num_steps for one in found),
            "passes": [{"epoch": one.epoch, "offset": one.offset, "steps": one.num_steps} for one in found],
        }
        for rank, found in ranks.items()
    }


def account_loader(
    loader: LoaderPlan,
    *,
    records: Sequence[ShardRecord],
    passes: Sequence[RankPass],
    world_size: int,
    remainder: Remainder,
    delivered: int,
) -> LoaderAccount:
    """Close the books of one loader: ``consumed = committed - dropped - unread + padded + replayed``.

    Args:
        loader: how the loader was to be prepared.
        records: its ledger.
        passes: what its ranks read, of all ranks.
        world_size: the ranks of the training.
        remainder: the request's rule for an epoch that the ranks do not divide.
        delivered: elements that the hosts' feeders brought, distinct on each host. What two hosts needed a part of
            counts twice, so it is no term of the books.

    Returns:
        The account; ``explained`` is false when units are missing, or elements are unread and nothing says why.
    """
    epochs = _epochs(loader, records)
    by_epoch: dict[int, list[RankPass]] = defaultdict(list)
    for one in passes:
        by_epoch[one.epoch].append(one)
    counts = [
        _count(epoch, by_epoch.get(epoch.number, []), world_size=world_size, remainder=remainder) for epoch in epochs
    ]
    extracted = sum(epoch.length for epoch in epochs)
    faults = _uneven(passes)
    if extracted != loader.units:
        faults.append(f"asked for {loader.units} units, the ledger holds {extracted}")
    if unknown := sorted(set(by_epoch) - {epoch.number for epoch in epochs}):
        faults.append(f"ranks read epochs that the ledger does not hold: {unknown}")
    faults += [
        f"epoch {epoch.number}: {count.unread} elements are unread and nothing says why"
        for epoch, count in zip(epochs, counts, strict=True)
        if count.unread and not count.reasons
    ]
    notes = [reason for count in counts for reason in count.reasons]
    if delivered > extracted:
        notes.append(
            f"at least {delivered - extracted} elements were brought to more than one host: lanes that hosts share, as"
            " where loader workers end early"
        )
    if any(one.replay for one in passes):
        notes.append("training made more passes than there are prepared epochs; they were replayed in order")
    return LoaderAccount(
        asked=loader.units,
        extracted=extracted,
        committed=extracted,
        delivered=delivered,
        consumed=sum(one.num_steps for one in passes),
        dropped=sum(count.dropped for count in counts),
        unread=sum(count.unread for count in counts),
        padded=sum(count.padding for count in counts),
        replayed=sum(count.repeated for count in counts),
        explained=not faults,
        notes=faults + notes,
        per_rank=_per_rank(passes),
    )
