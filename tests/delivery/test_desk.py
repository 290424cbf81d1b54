from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from taas.errors import DeliveryError, StoreUnavailable
from taas_tasks.delivery.desk import Desk, Drop, Fetch, HandOut, Tell
from taas_tasks.delivery.parts import Ranks, Segment, lay_out
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import LoaderPlan, SegmentSizes
from tests.delivery.support import Prepared

T = TypeVar("T")
SIZES = SegmentSizes(first=32, largest=32, machines=1)


def segments(count: int, *, name: str = "data", epochs: int = 1) -> list[Segment]:
    prepared = Prepared(MemoryStore(), units=32 * count * epochs, length=32 * count, name=name, sizes=SIZES)
    return [Segment.of(prepared.commit(*one)) for one in prepared.segments()]


@cache
def size_of_part() -> int:
    return lay_out(segments(2)[0], 2**32 - 1).num_bytes


def plan_of(found: list[Segment], name: str, *, units: int | None) -> LoaderPlan:
    epochs = {one.epoch for one in found if one.loader == name}
    length = max(one.stop for one in found if one.loader == name)
    known = units is None
    return Prepared(
        MemoryStore(), units=units or length * len(epochs), length=length, name=name, known_length=known
    ).plan


def new_desk(found: list[Segment], *, parts: float, fetches: int = 8, units: int | None = None) -> Desk:
    """A desk of a host with two ranks whose budget holds so many parts per loader.

    With ``units`` the epochs' lengths are not known beforehand.
    """
    plans = {name: plan_of(found, name, units=units) for name in sorted({one.loader for one in found})}
    cache_bytes = int(size_of_part() * parts) * len(plans)
    desk = Desk(Ranks(0, 2, 2), plans, cache_bytes=cache_bytes, host="h", max_fetches=fetches)
    for one in found:
        desk.add_segment(one)
    return desk


def of(kind: type[T], actions: list[Any]) -> list[T]:
    return [one for one in actions if isinstance(one, kind)]


def fetch_all(desk: Desk) -> list[int]:
    """Carry out what the desk wants fetched; return the segments' numbers."""
    fetches = of(Fetch, desk.decide())
    for one in fetches:
        desk.fetched(one.key)
    return [one.segment.n for one in fetches]


def open_and_ask(desk: Desk, connection: int, *, index: int = 0, loader: str = "data") -> None:
    desk.open(connection, loader=loader, epoch=0, offset=0, index=index, asks=[question(index)])


def question(position: int, *, stream: int = 0, number: int = 1, offset: int = 0, slot: int | None = None) -> list[int]:
    return [stream if slot is None else slot, number, stream, position, offset]


def handed(desk: Desk) -> list[tuple[int, int]]:
    return [(one.connection, one.segment.n) for one in of(HandOut, desk.decide())]


def release(desk: Desk, connection: int, n: int) -> None:
    desk.release(connection, epoch=0, stream=0, n=n, lanes=2**32 - 1)


def test_the_first_parts_are_fetched_in_order_before_anyone_asks() -> None:
    desk = new_desk(segments(6), parts=3.5)
    assert fetch_all(desk) == [0, 1, 2]
    assert fetch_all(desk) == []


def test_no_more_than_some_fetches_are_under_way() -> None:
    desk = new_desk(segments(6), parts=10, fetches=2)
    assert [one.segment.n for one in of(Fetch, desk.decide())] == [0, 1]
    assert of(Fetch, desk.decide()) == []


def test_a_part_is_dropped_when_the_last_open_iterator_has_gone_past_it() -> None:
    desk = new_desk(segments(6), parts=2.5)
    for rank in (1, 2):
        open_and_ask(desk, rank)
    fetch_all(desk)
    assert handed(desk) == [(1, 0), (2, 0)]
    release(desk, 1, 0)
    assert of(Drop, desk.decide()) == []
    release(desk, 2, 0)
    actions = desk.decide()
    assert [one.key.n for one in of(Drop, actions)] == [0]
    assert [one.segment.n for one in of(Fetch, actions)] == [2]


def test_a_part_is_kept_for_a_slower_rank_while_the_budget_allows() -> None:
    desk = new_desk(segments(6), parts=3.5)
    open_and_ask(desk, 1)
    open_and_ask(desk, 2)
    fetch_all(desk)
    handed(desk)
    release(desk, 1, 0)
    desk.ask(1, asks=[question(32)])
    assert handed(desk) == [(1, 1)]
    release(desk, 1, 1)
    assert of(Drop, desk.decide()) == []  # rank 2 still needs parts 0 (held) and 1
    desk.ask(2, asks=[question(32)])
    assert handed(desk) == [(2, 1)]


def test_a_rank_that_waits_gets_its_part_although_another_holds_the_whole_budget() -> None:
    desk = new_desk(segments(6), parts=1.5)
    open_and_ask(desk, 1)
    fetch_all(desk)
    handed(desk)  # rank 1 holds part 0 and goes nowhere
    open_and_ask(desk, 2, index=64)
    assert fetch_all(desk) == []  # asking ahead does not exceed the budget
    desk.wait(2, slot=0)
    assert fetch_all(desk) == [2]
    assert handed(desk) == [(2, 2)]


def test_a_late_iterator_has_what_was_dropped_fetched_again() -> None:
    desk = new_desk(segments(6), parts=1.5)
    open_and_ask(desk, 1, index=128)
    assert fetch_all(desk) == [4]
    assert handed(desk) == [(1, 4)]
    open_and_ask(desk, 2)
    desk.wait(2, slot=0)
    assert fetch_all(desk) == [0]
    assert handed(desk) == [(2, 0)]


def test_what_one_rank_has_read_is_kept_for_one_that_has_not_begun_while_there_is_room() -> None:
    desk = new_desk(segments(4), parts=4.5)
    open_and_ask(desk, 1)
    fetch_all(desk)
    assert handed(desk) == [(1, 0)]
    desk.ask(1, asks=[question(32, number=2)])
    release(desk, 1, 0)
    assert of(Drop, desk.decide()) == []
    open_and_ask(desk, 2)
    assert handed(desk) == [(2, 0)]


def test_a_closed_iterator_holds_nothing_back() -> None:
    desk = new_desk(segments(6), parts=1.5)
    open_and_ask(desk, 1)
    fetch_all(desk)
    handed(desk)
    desk.close(1)
    open_and_ask(desk, 2, index=160)
    actions = desk.decide()
    assert [one.key.n for one in of(Drop, actions)] == [0]
    assert [one.segment.n for one in of(Fetch, actions)] == [5]


def test_after_a_finished_pass_the_next_epoch_is_fetched_ahead() -> None:
    desk = new_desk(segments(2, epochs=2), parts=2.5)
    open_and_ask(desk, 2, index=32)
    desk.close(2)
    open_and_ask(desk, 1, index=32)
    assert [(one.segment.epoch, one.segment.n) for one in of(Fetch, desk.decide())] == [(0, 1), (1, 0)]
    desk.close(1, finished=True)
    desk.close(1)  # the connection's end comes too
    assert [(one.segment.epoch, one.segment.n) for one in of(Fetch, desk.decide())] == []
    desk.fetched(lay_key(0, 1))
    actions = desk.decide()
    assert [one.key for one in of(Drop, actions)] == [lay_key(0, 1)]
    assert [(one.segment.epoch, one.segment.n) for one in of(Fetch, actions)] == [(1, 1)]


def serve(desk: Desk) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Carry out what the desk wants until it wants nothing; return what was fetched and what was handed out."""
    fetched, given = [], []
    while actions := desk.decide():
        for one in of(Fetch, actions):
            desk.fetched(one.key)
            fetched.append((one.key.epoch, one.key.n))
        given += [(one.connection, one.segment.n) for one in of(HandOut, actions)]
    return fetched, given


def read_epoch(desk: Desk, connection: int, *, num_segments: int) -> list[tuple[int, int]]:
    """Read epoch 0 from its start; return what was fetched meanwhile."""
    seen = []
    open_and_ask(desk, connection)
    for n in range(num_segments):
        fetched, given = serve(desk)
        assert given == [(connection, n)]
        seen += fetched
        release(desk, connection, n)
        desk.ask(connection, asks=[question(32 * (n + 1), number=n + 2)])
    return seen


def test_parts_of_an_epoch_that_another_rank_has_not_begun_are_kept() -> None:
    desk = new_desk(segments(2, epochs=8), parts=4.5)
    read_epoch(desk, 1, num_segments=2)
    desk.close(1, finished=True)
    serve(desk)
    assert not [one for one in read_epoch(desk, 2, num_segments=2) if one[0] == 0]


def test_parts_of_a_replay_that_another_rank_has_not_begun_are_kept() -> None:
    desk = new_desk(segments(2), parts=4.5)
    for connection in (1, 2):
        read_epoch(desk, connection, num_segments=2)
    for connection in (1, 2):
        desk.close(connection, finished=True)
    serve(desk)
    read_epoch(desk, 3, num_segments=2)
    desk.close(3, finished=True)
    serve(desk)
    assert read_epoch(desk, 4, num_segments=2) == []


def test_parts_for_a_rank_that_never_comes_take_half_of_the_budget_at_most() -> None:
    desk = new_desk(segments(9), parts=4.5)
    assert read_epoch(desk, 1, num_segments=8) == [(0, n) for n in range(9)]
    assert desk.cached_bytes <= size_of_part() * 4.5


def lay_key(epoch: int, n: int) -> Any:
    from taas_tasks.delivery.parts import PartKey

    return PartKey("data", epoch, 0, n, 2**32 - 1)


def test_each_loader_has_its_own_share_of_the_cache() -> None:
    desk = new_desk([*segments(4, name="a"), *segments(4, name="b")], parts=2.5)
    fetches = [(one.segment.loader, one.segment.n) for one in of(Fetch, desk.decide())]
    assert fetches == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_a_part_larger_than_the_budget_fails_the_loader_at_once_naming_both_numbers() -> None:
    desk = new_desk(segments(2), parts=0.5)
    open_and_ask(desk, 1)
    (told,) = of(Tell, desk.decide())
    fields = told.message["error"]["fields"]
    assert fields["needed_bytes"] == size_of_part() and fields["budget_bytes"] == size_of_part() // 2
    assert fetch_all(desk) == []


def test_a_failed_fetch_is_told_to_who_asked_and_tried_again_when_asked_again() -> None:
    desk = new_desk(segments(1), parts=1.5)
    open_and_ask(desk, 1)
    (fetch,) = of(Fetch, desk.decide())
    desk.fetch_failed(fetch.key, StoreUnavailable("down"))
    actions = desk.decide()
    assert [one.message["error"]["type"] for one in of(Tell, actions)] == ["StoreUnavailable"]
    (again,) = of(Fetch, actions)
    desk.fetch_failed(again.key, StoreUnavailable("still down"))  # nobody waits for it: it is not tried for ever
    assert desk.decide() == []
    desk.ask(1, asks=[question(0)])
    assert fetch_all(desk) == [0]
    assert handed(desk) == [(1, 0)]


def test_a_loader_that_cannot_be_followed_any_more_answers_every_question_with_the_reason() -> None:
    desk = new_desk(segments(2), parts=2)
    desk.fail_loader("data", DeliveryError("the ledger is gone"))
    open_and_ask(desk, 1)
    desk.look(2, loader="data", epoch=0)
    desk.ask_reach(2, index=5)
    assert [one.message["error"]["message"] for one in of(Tell, desk.decide())] == ["the ledger is gone"] * 2


def test_a_question_about_the_reach_is_answered_when_the_element_is_there_and_reads_nothing() -> None:
    found = segments(3)
    desk = new_desk(found[:1], parts=3, units=200)
    desk.look(1, loader="data", epoch=0)
    desk.ask_reach(1, index=40)
    assert of(Tell, desk.decide()) == []
    desk.add_segment(found[1])
    assert [one.message for one in of(Tell, desk.decide())] == [{"reach": 64}]
    desk.ask_reach(1, index=2**62)
    desk.add_segment(found[2])
    assert [one.message["epoch_length"] for one in of(Tell, desk.decide())] == [96]


def test_a_question_about_an_epoch_that_never_comes_is_answered_by_their_number() -> None:
    desk = new_desk(segments(1, epochs=2), parts=3, units=64)
    desk.look(1, loader="data", epoch=2)
    desk.ask_reach(1, index=0)
    assert [one.message for one in of(Tell, desk.decide())] == [{"num_epochs": 2}]


def test_what_ranks_hold_and_what_is_cached_stays_bounded_in_a_whole_pass() -> None:
    found = segments(40)
    desk = new_desk(found, parts=3.5)
    for rank in (1, 2):
        open_and_ask(desk, rank)
    largest, taken = 0, []
    while len(taken) < 80:
        actions = desk.decide()
        for fetch in of(Fetch, actions):
            desk.fetched(fetch.key)
        largest = max(largest, desk.cached_bytes)
        for one in of(HandOut, actions):
            taken.append((one.connection, one.segment.n))
            if one.segment.n:
                release(desk, one.connection, one.segment.n - 1)
            desk.ask(one.connection, asks=[question(32 * (one.segment.n + 1))])
            desk.wait(one.connection, slot=0)
    assert taken == [(rank, n) for n in range(40) for rank in (1, 2)]
    assert largest <= 3.5 * size_of_part()
