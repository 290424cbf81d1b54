"""Whether a lane delivered what it must: each element once, in its own unshuffled order, byte for byte. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from typing import TypeAlias

Seen: TypeAlias = Sequence[tuple[Sequence[int], str]]  # (ids, digest) of each element, in the order of delivery


@dataclass(frozen=True)
class Truth:
    """What there is to deliver: ids and digest of every element, in order; one is named as often as it is to come."""

    elements: tuple[tuple[tuple[int, ...], str], ...]

    def digests(self) -> dict[tuple[int, ...], str]:
        return dict(self.elements)


Order: TypeAlias = Callable[[Truth, list[list[tuple[int, ...]]]], "str | None"]
"""Says what is wrong with the order of ids per rank, if anything."""


def fault(truth: Truth, ranks: Sequence[Seen], order: Order) -> str | None:
    """Return why a lane does not count, or None."""
    digests = truth.digests()
    got = [[(tuple(ids), digest) for ids, digest in seen] for seen in ranks]
    every = list(chain.from_iterable(got))
    unknown = [ids for ids, _ in every if ids not in digests]
    if unknown:
        return f"{len(unknown)} element(s) that do not exist, the first with ids {list(unknown[0])[:4]}"
    wrong = [ids for ids, digest in every if digests[ids] != digest]
    if wrong:
        return f"{len(wrong)} element(s) with wrong contents, the first with ids {list(wrong[0])[:4]}"
    wanted, came = Counter(ids for ids, _ in truth.elements), Counter(ids for ids, _ in every)
    if missing := (wanted - came).total():
        return f"{missing} of {wanted.total()} elements are missing"
    if more := (came - wanted).total():
        return f"{more} element(s) came more than once"
    return order(truth, [[ids for ids, _ in seen] for seen in got])


def passes(ranks: Sequence[Seen], epochs: int) -> list[list[Seen]]:
    """Cut what each rank was given into as many passes of equal length; what is left over goes to the last one."""
    cut = []
    for epoch in range(epochs):
        bounds = [(len(seen) // epochs * epoch, len(seen) // epochs * (epoch + 1)) for seen in ranks]
        last = epoch == epochs - 1
        cut.append([seen[low : None if last else high] for seen, (low, high) in zip(ranks, bounds, strict=True)])
    return cut


def strided(groups: Sequence[Sequence[int]], world_size: int) -> Order:
    """Return the rule "rank r takes element t * world_size + r at step t"; a process may have several ranks in turn."""

    def check(truth: Truth, got: list[list[tuple[int, ...]]]) -> str | None:
        ids = [one for one, _ in truth.elements]
        steps = range(0, len(ids), world_size)
        return _compare([[ids[step + rank] for step in steps for rank in group] for group in groups], got)

    return check


def by_shards(*, shards: int, workers: int, message: int) -> Order:
    """Return webdataset's rule: shards go round the ranks, then round the workers, whose messages take turns."""

    def check(truth: Truth, got: list[list[tuple[int, ...]]]) -> str | None:
        ids = [one for one, _ in truth.elements]
        size = len(ids) // shards
        cut = [ids[size * shard : size * (shard + 1)] for shard in range(shards)]
        wanted = []
        for rank in range(len(got)):
            own = cut[rank :: len(got)]
            streams = [list(chain.from_iterable(own[worker :: max(1, workers)])) for worker in range(max(1, workers))]
            wanted.append(_take_turns(streams, message))
        return _compare(wanted, got)

    return check


def ascending(*, workers: int, message: int, chunk: int = 0) -> Order:
    """Return litdata's rule: each worker of a rank has a share of its own in ascending order; messages take turns.

    In a dataset that repeats itself, of chunks of so many elements, a share may begin anew behind a whole chunk.
    """

    def check(truth: Truth, got: list[list[tuple[int, ...]]]) -> str | None:
        place = {ids: index for index, ids in enumerate(dict.fromkeys(ids for ids, _ in truth.elements))}
        for rank, seen in enumerate(got):
            messages = [seen[at : at + message] for at in range(0, len(seen), message)]
            for worker in range(max(1, workers)):
                stream = [place[ids] for ids in chain.from_iterable(messages[worker :: max(1, workers)])]
                if any(not _rises(*pair, chunk=chunk) for pair in pairwise(stream)):
                    return f"rank {rank}: the elements of loader worker {worker} are not in ascending order"
        return None

    return check


def _rises(one: int, following: int, *, chunk: int) -> bool:
    return following > one or (chunk > 0 and (one + 1) % chunk == 0 and following % chunk == 0)


def _take_turns(streams: list[list[tuple[int, ...]]], message: int) -> list[tuple[int, ...]]:
    cut = [[stream[at : at + message] for at in range(0, len(stream), message)] for stream in streams]
    return [ids for turn in zip_longest(*cut, fillvalue=[]) for one in turn for ids in one]


def _compare(wanted: list[list[tuple[int, ...]]], got: list[list[tuple[int, ...]]]) -> str | None:
    for rank, (right, seen) in enumerate(zip(wanted, got, strict=True)):
        if right != seen:
            at = next(n for n, pair in enumerate(zip_longest(right, seen)) if pair[0] != pair[1])
            return f"rank {rank}: wrong order from its element {at} on"
    return None
