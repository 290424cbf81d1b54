"""How many steps a pass has, and which element a rank takes at a step. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from taas_tasks.plan import Epochs, padding_of
from taas_tasks.streams import Merge, lengths_of_streams

Remainder = Literal["pad", "drop"]


def num_steps(epoch_length: int, *, offset: int, world_size: int, remainder: Remainder) -> int:
    """Return the steps of a pass from ``offset`` of an epoch on: the same number on every rank."""
    rest = max(0, epoch_length - offset)
    return -(-rest // world_size) if remainder == "pad" else rest // world_size


@dataclass(frozen=True)
class Ending:
    """How an epoch ends: its length, its length with the padding that the shards hold, and where streams ended.

    ``lengths`` (of a merged loader) has the streams that end before the epoch does, and perhaps others.
    """

    length: int
    padded: int
    lengths: Mapping[int, int] = field(default_factory=dict)


def ending_of(length: int, *, num_streams: int, is_merged: bool) -> Ending:
    """Return how an epoch ends whose length is known beforehand."""
    if is_merged:
        return Ending(length, length, lengths_of_streams(num_streams, length))
    return Ending(length, length + padding_of(length))


@dataclass(frozen=True)
class Place:
    """Where an element is found: its position in its stream, and the offset of the pass that it would belong to."""

    stream: int
    position: int
    offset: int


def place_of(index: int, *, offset: int, ending: Ending | None, merge: Merge) -> Place:
    """Return where element ``index`` of a pass from ``offset`` on lies.

    Padding repeats the epoch from its start. Where one stream is the epoch, its last segment holds the padding up to a
    multiple of 32; what a pass needs beyond that (after a resume; all of it in a merged loader) is read where the epoch
    begins.
    """
    if ending is None or index < ending.padded:
        return Place(*merge.locate(index), offset)
    wrapped = index % ending.length
    return Place(*merge.locate(wrapped), offset - (index - wrapped))


def alive_at(merge: Merge, index: int) -> tuple[int, int | None]:
    """Return how many streams yield at an index of the epoch, and up to which index (None: as far as is known)."""
    place = bisect_right(merge.runs, index, key=lambda run: run.index)
    return len(merge.runs[place - 1].alive), merge.runs[place].index if place < len(merge.runs) else None


def next_position(
    merge: Merge, stream: int, *, first: int, world_size: int, position: int = 0, below: int | None = None
) -> int | None:
    """Return the next position of a stream, from ``position`` on, that a rank takes; None if it takes no more.

    Args:
        merge: the order of the epoch, as far as it is known.
        stream: whose position.
        first: the rank takes the elements ``first``, ``first + world_size``, ... of the epoch.
        world_size: see there.
        position: not before this one.
        below: the rank takes no element from this index on.
    """
    for run, next_run in zip(merge.runs, [*merge.runs[1:], None], strict=True):
        if stream not in run.alive:
            continue
        stride, at = len(run.alive), run.index + run.alive.index(stream)
        low = max(position, run.position + max(0, -((at - first) // stride)))
        period = world_size // math.gcd(stride, world_size)
        end = merge.lengths.get(stream) if next_run is None else next_run.position
        high = low + period if end is None else min(low + period, end)
        for found in range(low, high):
            index = at + (found - run.position) * stride
            if (index - first) % world_size == 0:
                return found if below is None or index < below else None
    return None


def epochs_with_steps(epochs: Epochs, *, world_size: int, remainder: Remainder) -> int | None:
    """Return how many epochs give at least one step: a last, partial one may be dropped whole; None when not known."""
    count = epochs.num
    while count and not num_steps(
        epochs.length_of(count - 1) or 0, offset=0, world_size=world_size, remainder=remainder
    ):
        count -= 1
    return count
