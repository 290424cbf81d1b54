"""How many steps a pass has, and which element a rank takes at a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from taas_tasks.plan import Epochs

Remainder = Literal["pad", "drop"]


def num_steps(epoch_length: int, *, offset: int, world_size: int, remainder: Remainder) -> int:
    """Return the steps of a pass from ``offset`` of an epoch on: the same number on every rank."""
    rest = max(0, epoch_length - offset)
    return -(-rest // world_size) if remainder == "pad" else rest // world_size


@dataclass(frozen=True)
class Place:
    """Where an element is found: its index in the shards, and the offset of the pass that it would belong to there."""

    index: int
    offset: int


def place_of(index: int, *, offset: int, epoch_length: int | None, padded_length: int | None) -> Place:
    """Return where element ``index`` of a pass from ``offset`` on lies.

    Padding repeats the epoch from its start. The epoch's last segment holds the padding up to a multiple of 32; a pass
    that began elsewhere (a resume) may need more, which is then read where the epoch begins.
    """
    if epoch_length is None or index < (padded_length if padded_length is not None else epoch_length):
        return Place(index, offset)
    wrapped = index % epoch_length
    return Place(wrapped, offset - (index - wrapped))


def epochs_with_steps(epochs: Epochs, *, world_size: int, remainder: Remainder) -> int | None:
    """Return how many epochs give at least one step: a last, partial one may be dropped whole; None when not known."""
    count = epochs.num
    while count and not num_steps(
        epochs.length_of(count - 1) or 0, offset=0, world_size=world_size, remainder=remainder
    ):
        count -= 1
    return count
