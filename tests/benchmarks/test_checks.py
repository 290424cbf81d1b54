"""A lane of the benchmark that delivers something wrong does not count."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.delivery import checks
from benchmarks.delivery.checks import Truth
from benchmarks.delivery.workloads import Witness, element

Rank = list[tuple[list[int], str]]
_COUNT = 16
_INDICES = {0: list(range(0, _COUNT, 2)), 1: list(range(1, _COUNT, 2))}


def truth() -> Truth:
    witness = Witness()
    for index in range(_COUNT):
        witness.take(element("records", index))
    return Truth(tuple((tuple(ids), digest) for ids, digest in witness.seen))


def delivered() -> list[Rank]:
    """What two ranks are given when all is right."""
    ranks = []
    for rank in (0, 1):
        witness = Witness()
        for index in _INDICES[rank]:
            witness.take(element("records", index))
        ranks.append(witness.seen)
    return ranks


def test_right_lane_counts() -> None:
    assert checks.fault(truth(), delivered(), checks.strided([[0], [1]], 2)) is None


def with_wrong_element() -> list[Rank]:
    ranks, witness, changed = delivered(), Witness(), element("records", 4)
    changed["features"][-1] += 1
    witness.take(changed)
    ranks[0][2] = witness.seen[0]
    return ranks


def with_missing_element() -> list[Rank]:
    ranks = delivered()
    del ranks[1][-1]
    return ranks


def with_element_twice() -> list[Rank]:
    ranks = delivered()
    ranks[1].append(ranks[0][0])
    return ranks


def with_wrong_order() -> list[Rank]:
    ranks = delivered()
    ranks[0][1], ranks[0][2] = ranks[0][2], ranks[0][1]
    return ranks


def with_swapped_ranks() -> list[Rank]:
    return delivered()[::-1]


@pytest.mark.parametrize(
    ("lane", "reason"),
    [
        (with_wrong_element, "wrong contents"),
        (with_missing_element, "missing"),
        (with_element_twice, "more than once"),
        (with_wrong_order, "wrong order"),
        (with_swapped_ranks, "wrong order"),
    ],
)
def test_wrong_lane_is_void_with_the_reason(lane: Callable[[], list[Rank]], reason: str) -> None:
    assert reason in (checks.fault(truth(), lane(), checks.strided([[0], [1]], 2)) or "")


def test_shards_go_round_the_ranks_and_messages_round_the_workers() -> None:
    order = checks.by_shards(shards=8, workers=2, message=1)
    ids = [(index,) for index in range(_COUNT)]
    # two elements a shard; rank 0 has the shards 0, 2, 4, 6; its workers 0, 4 and 2, 6
    right = [[0, 4, 1, 5, 8, 12, 9, 13], [2, 6, 3, 7, 10, 14, 11, 15]]
    assert order(truth(), [[ids[index] for index in rank] for rank in right]) is None
    in_sequence = [[0, 1, 4, 5, 8, 9, 12, 13], right[1]]
    assert "wrong order" in (order(truth(), [[ids[index] for index in rank] for rank in in_sequence]) or "")


def test_descending_share_of_a_loader_worker_is_void() -> None:
    order = checks.ascending(workers=1, message=2)
    ids = [(index,) for index in range(_COUNT)]
    assert order(truth(), [ids[:8], ids[8:]]) is None
    assert "ascending" in (order(truth(), [ids[:8], ids[:7:-1]]) or "")


def test_second_pass_with_a_wrong_element_is_found() -> None:
    right, wrong = delivered(), with_wrong_element()
    both = [first + second for first, second in zip(right, wrong, strict=True)]
    faults = [checks.fault(truth(), one, checks.strided([[0], [1]], 2)) for one in checks.passes(both, 2)]
    assert faults[0] is None
    assert "wrong contents" in (faults[1] or "")


def repeated(times: int) -> Truth:
    return Truth(truth().elements * times)


def test_longer_dataset_delivers_every_element_as_often_as_it_is_stored() -> None:
    ranks = [rank * 3 for rank in delivered()]
    assert checks.fault(repeated(3), ranks, checks.strided([[0], [1]], 2)) is None
    fewer = [rank[:-1] for rank in ranks]
    assert "2 of 48 elements are missing" in (checks.fault(repeated(3), fewer, checks.strided([[0], [1]], 2)) or "")
    more = [rank + rank[:1] for rank in ranks]
    assert "2 element(s) came more than once" in (checks.fault(repeated(3), more, checks.strided([[0], [1]], 2)) or "")


def test_one_element_instead_of_another_is_missing_in_a_longer_dataset() -> None:
    ranks = [rank * 3 for rank in delivered()]
    ranks[0][8] = ranks[0][9]
    assert "1 of 48 elements are missing" in (checks.fault(repeated(3), ranks, checks.strided([[0], [1]], 2)) or "")


def test_share_may_begin_anew_only_behind_a_whole_chunk_and_with_a_whole_chunk() -> None:
    order = checks.ascending(workers=1, message=4, chunk=4)
    ids = [(index,) for index in range(_COUNT)]
    assert order(repeated(2), [ids + ids[:8], ids[8:]]) is None
    for wrong in (ids + ids[1:8], ids[:-1] + ids[:8], ids[:4] + [ids[6], ids[5], ids[7]]):
        assert "ascending" in (order(repeated(2), [wrong, ids[8:]]) or "")


def test_dataset_that_does_not_repeat_itself_never_begins_anew() -> None:
    ids = [(index,) for index in range(_COUNT)]
    assert "ascending" in (checks.ascending(workers=1, message=4)(truth(), [ids[8:] + ids[:8], []]) or "")
