from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from taas_tasks.prep.pipeline import LoadedSegment
from taas_tasks.prep.stream_reading import Stream
from taas_tasks.prep.virtual_workers import Positioned, Read, StreamEnd
from taas_tasks.store.memory import MemoryStore
from tests.prep import cases


def stream(*, exact: bool = False, **more: Any) -> Stream:
    """Stream 1 of 2, in segments of 2, 4, 4, … elements; an iterable, or map-style with 7 elements in an epoch."""

    def make() -> DataLoader[Any]:
        dataset: Any = cases.Squares(7) if exact else cases.Numbers(20)
        return DataLoader(dataset, batch_size=None, num_workers=2)

    plan = cases.plan_of(
        MemoryStore(),
        make,
        units=40,
        randomness="exact" if exact else "element",
        sizes={"first": 2, "largest": 4},
        **more,
    )
    return Stream(1, plan=cases.loader_plan_of(plan))


def row(epoch: int, index: int) -> Any:
    return epoch, index


def asked(one: Stream, limit: int, room: int = 99) -> list[Read]:
    return list(one.reads(limit, room=room, row=row))


def cuts(loaded: list[LoadedSegment]) -> list[tuple[int, int, int, list[Any], bool]]:
    found = [(part.segment, part.elements) for part in loaded]
    return [(one.n, one.start, one.stop, elements, one.last_of_epoch) for one, elements in found]


def given(one: Stream, reads: list[Read], *, end: bool = False) -> list[tuple[int, int, int, list[Any], bool]]:
    loaded = [part for read in reads for part in one.take(read, read.position)]
    if end:
        loaded += [part for read in asked(one, 10**6, room=2) for part in one.take(read, StreamEnd())]
    return cuts(loaded)


def test_only_what_is_certain_is_asked_for_and_not_more_than_there_is_room() -> None:
    one = stream()
    assert [(read.position, read.row) for read in asked(one, 5, room=2)] == [(0, (0, 1)), (1, (0, 3))]
    assert [read.position for read in asked(one, 5)] == [2, 3, 4]
    assert asked(one, 5) == []


def test_a_segment_is_held_until_a_further_element_comes() -> None:
    one = stream()
    first, second, third = asked(one, 3)
    assert given(one, [first, second]) == []
    assert given(one, [third]) == [(0, 0, 2, [0, 1], False)]


def test_the_end_marks_the_held_segment_or_the_rest_and_is_told_once() -> None:
    one, other = stream(), stream()
    assert given(one, asked(one, 2), end=True) == [(0, 0, 2, [0, 1], True)]
    assert given(other, asked(other, 3), end=True) == [(0, 0, 2, [0, 1], False), (1, 2, 3, [2], True)]
    assert other.is_closed
    assert given(other, [Read(0, 9, None)]) == []


def test_what_is_certain_is_committed_without_waiting_and_the_next_segment_starts_there() -> None:
    one = stream()
    assert given(one, asked(one, 3)) == [(0, 0, 2, [0, 1], False)]
    assert cuts(list(one.settle(4))) == []
    assert cuts(list(one.settle(3))) == [(1, 2, 3, [2], False)]
    assert cuts(list(one.settle(3))) == []
    assert given(one, asked(one, 8), end=True) == [(2, 3, 7, [3, 4, 5, 6], False), (3, 7, 8, [7], True)]


def test_a_stream_that_ends_where_it_was_settled_gets_an_empty_segment() -> None:
    one = stream()
    given(one, asked(one, 2))
    assert cuts(list(one.settle(2))) == [(0, 0, 2, [0, 1], False)]
    assert given(one, [], end=True) == [(1, 2, 2, [], True)]


def test_committed_elements_are_passed_over() -> None:
    one = stream()
    one.enter(0, 1, 2)
    assert given(one, asked(one, 7)) == [(1, 2, 6, [2, 3, 4, 5], False)]


def test_a_known_length_ends_the_stream_without_asking_for_its_end() -> None:
    one = stream(exact=True)  # 7 elements: 4 of stream 0, 3 of stream 1
    assert given(one, asked(one, 3)) == [(0, 0, 2, [0, 1], False), (1, 2, 3, [2], True)]
    assert one.has_ended


def test_an_earlier_epoch_is_read_for_the_worker_alone() -> None:
    one = stream()
    one.enter(1, 0, 0)
    one.read(0)
    assert one.is_passing_over
    assert given(one, asked(one, 3), end=True) == []
    assert one.has_ended
    one.read(1)
    assert given(one, asked(one, 1), end=True) == [(0, 0, 1, [0], True)]


@pytest.mark.parametrize(("limit", "told"), [(8, [1, 5, 7]), (5, [1, 4])])
def test_a_position_is_wanted_where_a_segment_ends(limit: int, told: list[int]) -> None:
    one = stream(has_position=True)
    reads = asked(one, limit)
    assert [read.position for read in reads if read.tells_position] == told
    loaded = [part for read in reads for part in one.take(read, Positioned(read.position, b"%d" % read.position))]
    loaded += one.settle(limit)
    assert [part.position for part in loaded] == [b"%d" % position for position in told]
