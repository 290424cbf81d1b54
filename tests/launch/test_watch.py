from __future__ import annotations

from collections.abc import Iterator

import pytest

from taas.errors import StoreUnavailable
from taas_tasks.launch.hang import NodeStillness
from taas_tasks.launch.watch import Staleness, Watch
from taas_tasks.layout import RunKeys
from taas_tasks.store import ObjectInfo
from taas_tasks.store.memory import MemoryStore


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class BrokenStore(MemoryStore):
    """Refuses to write."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        raise StoreUnavailable("down")

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        raise StoreUnavailable("down")


def watch(store: MemoryStore, node_rank: int, clock: Clock | None = None) -> Watch:
    return Watch(
        store, run="r", generation=1, node_rank=node_rank, nnodes=2, host=f"h{node_rank}", clock=clock or Clock()
    )


def test_failure_of_another_node_stops_this_one_and_says_why() -> None:
    store = MemoryStore()
    zero, one = watch(store, 0), watch(store, 1)
    one.mark_failed("rank 3 raised")
    zero.look()
    reason = zero.stop_reason()
    assert reason is not None
    assert (reason.kind, reason.node_rank) == ("failed", 1)
    assert "node 1 on h1 failed: rank 3 raised" in reason.message
    one.look()
    assert one.stop_reason() is None


def test_abort_object_stops_the_node() -> None:
    store = MemoryStore()
    store.put(RunKeys("r").abort, b"prepare failed")
    zero = watch(store, 0)
    zero.look()
    reason = zero.stop_reason()
    assert reason is not None
    assert reason.kind == "aborted"
    assert "prepare failed" in reason.message


def test_node_that_stops_beating_is_lost_after_forty_seconds() -> None:
    store, clock = MemoryStore(), Clock()
    zero, one = watch(store, 0, clock), watch(store, 1, clock)
    one.look()
    for _ in range(20):
        zero.look()
        clock.now += 2
    assert zero.stop_reason() is None
    for _ in range(3):
        zero.look()
        clock.now += 2
    reason = zero.stop_reason()
    assert reason is not None
    assert (reason.kind, reason.node_rank) == ("lost", 1)


def test_node_that_has_ended_may_stop_beating() -> None:
    store, clock = MemoryStore(), Clock()
    zero, one = watch(store, 0, clock), watch(store, 1, clock)
    one.look()
    one.mark_done(0)
    for _ in range(40):
        zero.look()
        clock.now += 2
    assert zero.stop_reason() is None


def test_outage_of_the_store_makes_nobody_stale() -> None:
    stale = Staleness(lost_after_s=10)
    assert stale.look({1: 5.0}, elapsed_s=0) == []
    # Nothing could be read for an hour; what a look counts is bounded by the caller, and the beat has moved on.
    assert stale.look({1: 3605.0}, elapsed_s=4) == []
    assert stale.look({1: 3605.0}, elapsed_s=4) == []


def test_all_done_only_when_every_node_has_ended_this_attempt() -> None:
    store = MemoryStore()
    zero, one = watch(store, 0), watch(store, 1)
    zero.mark_done(1)
    one.mark_done(0)
    zero.look()
    assert not zero.all_done(1)
    one.mark_done(1)
    zero.look()
    assert zero.all_done(1)


def test_telling_of_a_failure_does_not_hide_it_when_the_store_is_down() -> None:
    broken = watch(BrokenStore(), 0)
    broken.mark_failed("x")
    with pytest.raises(StoreUnavailable):
        broken.look()


def test_agent_that_waits_is_freed_once_when_there_is_a_reason_to_stop() -> None:
    store, freed = MemoryStore(), list[bool]()
    zero = watch(store, 0)
    zero.call_on_stop(lambda: freed.append(True))
    zero.look()
    assert freed == []
    store.put(RunKeys("r").abort, b"no")
    zero.look()
    zero.look()
    assert freed == [True]


def watched(store: MemoryStore, node_rank: int, clock: Clock, still: dict[int, bool]) -> Watch:
    made = watch(store, node_rank, clock)
    made.watch_ranks(lambda: NodeStillness(attempt=0, still=still[node_rank], idle_s=100))
    return made


def looks(watches: list[Watch], clock: Clock, *, seconds: int) -> None:
    for _ in range(seconds // 2):
        for one in watches:
            one.look()
        clock.now += 2


def test_nodes_that_are_still_together_for_two_heartbeats_hang_and_all_of_them_know() -> None:
    store, clock = MemoryStore(), Clock()
    both = [watched(store, number, clock, {0: True, 1: True}) for number in (0, 1)]
    looks(both, clock, seconds=10)
    assert not any(one.has_hung(0) for one in both)
    looks(both, clock, seconds=12)
    assert all(one.has_hung(0) for one in both)
    assert not any(one.has_hung(1) for one in both)


def test_a_node_whose_ranks_go_on_keeps_the_others_from_being_judged() -> None:
    store, clock, still = MemoryStore(), Clock(), {0: True, 1: False}
    both = [watched(store, number, clock, still) for number in (0, 1)]
    looks(both, clock, seconds=40)
    assert not both[0].has_hung(0)
    still[1] = True
    looks(both, clock, seconds=6)
    still[1] = False
    looks(both, clock, seconds=40)
    assert not both[0].has_hung(0)


def test_a_node_that_has_told_nothing_of_its_ranks_keeps_the_others_from_being_judged() -> None:
    store, clock = MemoryStore(), Clock()
    looks([watched(store, 0, clock, {0: True}), watch(store, 1, clock)], clock, seconds=60)
    assert store.head(RunKeys("r").watch_hang(1, 0)) is None


def test_stacks_are_there_when_every_node_has_taken_those_of_the_attempt() -> None:
    store, clock = MemoryStore(), Clock()
    zero, one = watch(store, 0, clock), watch(store, 1, clock)
    zero.mark_stacks(1)
    one.mark_stacks(0)
    zero.look()
    assert not zero.all_have_stacks(1)
    one.mark_stacks(1)
    zero.look()
    assert zero.all_have_stacks(1)
