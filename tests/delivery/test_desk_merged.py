"""The desk's rules for loaders whose loader workers are streams."""

from __future__ import annotations

import random
from typing import Any

import pytest

from taas_tasks.delivery.desk import Desk, Drop, Fetch, HandOut, Tell
from taas_tasks.delivery.parts import Ranks, Segment, lay_out
from taas_tasks.store.memory import MemoryStore
from taas_tasks.streams import Merge
from taas_tasks.values import SegmentSizes
from tests.delivery.support import MergedPrepared
from tests.delivery.test_desk import fetch_all, of, question

SIZES = SegmentSizes(first=16, largest=16, machines=1)
TWO = Ranks(0, 2, 2)
Key = tuple[int, int, int]


def prepare(lengths: list[int], *, epochs: int = 1, known: bool = False) -> tuple[MergedPrepared, dict[Key, Segment]]:
    prepared = MergedPrepared(
        MemoryStore(), units=sum(lengths) * epochs, lengths=[lengths], sizes=SIZES, known_length=known
    )
    keys = prepared.segments()
    return prepared, {key: Segment.of(prepared.commit(*key), num_streams=len(lengths)) for key in keys}


def new_desk(prepared: MergedPrepared, *, parts: float = 100, ranks: Ranks = TWO, fetches: int = 100) -> Desk:
    """A desk whose budget holds so many of the largest segments."""
    segments = [Segment.of(prepared.commit(*key), num_streams=prepared.num_streams) for key in prepared.segments()]
    cache_bytes = int(parts * max(lay_out(one, 2**32 - 1).num_bytes for one in segments))
    return Desk(ranks, {"data": prepared.plan}, cache_bytes=cache_bytes, host="h", max_fetches=fetches)


def fetched(actions: list[Any]) -> list[Key]:
    return [(one.segment.epoch, one.segment.stream, one.segment.n) for one in of(Fetch, actions)]


def pump(desk: Desk) -> list[HandOut]:
    """Carry out what the desk wants until it wants nothing; return what was handed out."""
    handed: list[HandOut] = []
    while actions := desk.decide():
        for one in of(Fetch, actions):
            desk.fetched(one.key)
        handed += of(HandOut, actions)
    return handed


def test_parts_are_fetched_in_the_order_in_which_the_merge_needs_them() -> None:
    prepared, segments = prepare([40, 20, 40], epochs=2)
    desk = new_desk(prepared)
    for key in prepared.shuffled(1):
        desk.add_segment(segments[key])
    first = [(0, s, n) for n, streams in ((0, (0, 1, 2)), (1, (0, 1, 2)), (2, (0, 2))) for s in streams]
    assert fetched(desk.decide()) == first + [(1, s, n) for _, s, n in first]


def test_behind_a_stream_that_lags_one_part_of_each_other_stream_is_fetched_ahead() -> None:
    prepared, segments = prepare([80, 80])
    desk = new_desk(prepared)
    for n in range(5):
        desk.add_segment(segments[0, 0, n])
    assert fetched(desk.decide()) == [(0, 0, 0), (0, 0, 1)]
    desk.add_segment(segments[0, 1, 0])
    assert fetched(desk.decide()) == [(0, 1, 0), (0, 0, 2)]


def test_a_rank_holds_a_part_of_each_stream_though_the_budget_is_smaller() -> None:
    prepared, segments = prepare([32, 32, 32])
    desk = new_desk(prepared, parts=1.2, ranks=Ranks(0, 1, 1))
    for one in segments.values():
        desk.add_segment(one)
    desk.open(1, loader="data", epoch=0, offset=0, index=0, asks=[question(0, stream=s) for s in range(3)])
    assert [one.segment.stream for one in pump(desk)] == [0]  # asking ahead does not exceed the budget
    for stream in (1, 2):
        desk.wait(1, slot=stream)  # it cannot go on without the part of this stream, and keeps those before
        assert [one.segment.stream for one in pump(desk)] == [stream]


def test_streams_that_a_rank_does_not_read_are_not_fetched_for_it() -> None:
    prepared, segments = prepare([64, 64])
    desk = new_desk(prepared, ranks=Ranks(0, 1, 2))
    for one in segments.values():
        desk.add_segment(one)
    desk.open(1, loader="data", epoch=0, offset=0, index=0, asks=[question(0, stream=0)])
    assert fetched(desk.decide()) == [(0, 0, n) for n in range(4)]


def test_the_beginning_is_kept_for_ranks_that_have_not_begun_their_pass() -> None:
    prepared, segments = prepare([32, 32])
    desk = new_desk(prepared)
    for one in segments.values():
        desk.add_segment(one)
    fetch_all(desk)
    desk.open(1, loader="data", epoch=0, offset=0, index=0, asks=[question(0, stream=0)])
    assert of(Drop, desk.decide()) == []
    desk.open(2, loader="data", epoch=0, offset=0, index=1, asks=[question(0, stream=1)])
    assert [one.segment.stream for one in of(HandOut, desk.decide())] == [1]


def test_the_reach_is_told_with_the_ends_of_streams_and_the_epochs_end() -> None:
    prepared, segments = prepare([20, 5])
    desk = new_desk(prepared)
    desk.look(1, loader="data", epoch=0)
    desk.ask_reach(1, index=0)
    desk.add_segment(segments[0, 1, 0])  # tells by a record of its own that the stream ends
    assert of(Tell, desk.decide()) == []
    desk.add_segment(segments[0, 0, 0])
    assert [one.message for one in of(Tell, desk.decide())] == [{"reach": 11, "lengths": []}]
    desk.ask_reach(1, index=11)
    desk.add_segment(segments[0, 1, 1])
    assert [one.message for one in of(Tell, desk.decide())] == [{"reach": 21, "lengths": [(1, 5)]}]
    desk.ask_reach(1, index=2**62)
    desk.add_segment(segments[0, 0, 1])
    (told,) = of(Tell, desk.decide())
    assert told.message == {"reach": 25, "lengths": [(1, 5), (0, 20)], "epoch_length": 25, "padded_length": 25}


def test_an_epoch_behind_the_units_is_answered_by_the_number_of_epochs() -> None:
    prepared, segments = prepare([20, 5], epochs=2)
    desk = new_desk(prepared)
    desk.look(1, loader="data", epoch=2)
    desk.ask_reach(1, index=0)
    for one in segments.values():
        assert of(Tell, desk.decide()) == []
        desk.add_segment(one)
    assert [one.message for one in of(Tell, desk.decide())] == [{"num_epochs": 2}]


def test_a_part_of_before_another_stream_ended_is_asked_for_again_with_the_lanes_of_now() -> None:
    prepared, segments = prepare([64, 4])
    desk = new_desk(prepared, ranks=Ranks(0, 1, 2))  # as long as both streams yield, rank 0 reads stream 0 alone
    desk.add_segment(segments[0, 0, 0])
    desk.add_segment(segments[0, 1, 0])
    desk.open(1, loader="data", epoch=0, offset=0, index=0, asks=[question(0, stream=0)])
    fetch_all(desk)
    (before,) = of(HandOut, desk.decide())
    assert before.key.lanes == sum(1 << lane for lane in range(0, 32, 2))
    desk.add_segment(segments[0, 1, 1])  # stream 1 has ended: from index 8 on, rank 0 takes each second of stream 0
    desk.ask(1, asks=[question(6, stream=0, number=2)])
    fetch_all(desk)
    (again,) = of(HandOut, desk.decide())
    assert again.message["number"] == 2 and again.segment is before.segment
    assert again.key.lanes == sum(1 << lane for lane in (0, 2, 4, 6, *range(8, 32, 4)))


def test_a_question_that_took_the_place_of_another_is_the_one_that_is_answered() -> None:
    prepared, segments = prepare([64, 64])
    desk = new_desk(prepared)
    desk.add_segment(segments[0, 0, 0])
    desk.open(1, loader="data", epoch=0, offset=0, index=0, asks=[question(40)])
    desk.ask(1, asks=[question(3, number=2)])
    fetch_all(desk)
    assert [(one.segment.n, one.message["number"]) for one in of(HandOut, desk.decide())] == [(0, 2)]


def test_a_stream_that_ended_before_the_plans_length_is_an_error_at_once() -> None:
    prepared, _ = prepare([20, 20], known=True)
    desk = new_desk(prepared)
    other, segments = prepare([20, 12])
    for key in other.segments():
        desk.add_segment(segments[key])
    desk.open(1, loader="data", epoch=0, offset=0, index=0, asks=[question(0)])
    (told,) = of(Tell, desk.decide())
    assert "stream 1 of epoch 0 has 20 elements, got a segment from position 12" in told.message["error"]["message"]


@pytest.mark.parametrize("seed", range(6))
def test_whole_epochs_flow_through_a_cache_of_two_parts_whatever_comes_first(seed: int) -> None:
    """Ranks at different speeds, streams in any order, ends that come late: everyone gets all and nobody waits."""
    rng = random.Random(seed)
    lengths = [rng.choice([0, 7, 33, 60]) for _ in range(rng.choice([1, 3, 4]))] + [25]
    prepared, segments = prepare(lengths)
    desk = new_desk(prepared, parts=2.2, fetches=2)
    coming = [segments[key] for key in prepared.shuffled(seed)]
    merge = Merge(len(lengths), dict(enumerate(lengths)))
    todo = {rank: list(range(rank, sum(lengths), 2)) for rank in (0, 1)}
    held: dict[tuple[int, int], Any] = {}
    for rank in todo:
        desk.open(rank, loader="data", epoch=0, offset=0, index=rank)
    for _ in range(4000):
        if coming and rng.random() < 0.3:
            desk.add_segment(coming.pop(0))
        for action in desk.decide():
            if isinstance(action, Fetch):
                desk.fetched(action.key)
            elif isinstance(action, HandOut):
                place = action.connection, action.segment.stream
                if place in held:
                    old = held[place].key
                    desk.release(action.connection, epoch=0, stream=old.stream, n=old.n, lanes=old.lanes)
                held[place] = action
        rank = rng.choice([one for one in todo if todo[one]] or [0])
        if not todo[rank]:
            break
        stream, position = merge.locate(todo[rank][0])
        part = held.get((rank, stream))
        lane = (position * len(lengths) + stream) % 32
        if part and part.segment.start <= position < part.segment.stop and part.key.lanes >> lane & 1:
            todo[rank].pop(0)
        else:
            desk.ask(rank, asks=[question(position, stream=stream)])
            desk.wait(rank, slot=stream)
    assert not todo[0] and not todo[1]
