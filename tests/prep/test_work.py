from __future__ import annotations

from collections.abc import Callable

from taas_tasks.layout import RunKeys
from taas_tasks.plan import owner_of, segments_in_order
from taas_tasks.prep.progress import Progress, SegmentId, committed_segments
from taas_tasks.prep.work import Pace, Work
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import LoaderPlan
from tests.test_ledger import loader_plan, put, record

KEYS = RunKeys("r")
PACE = Pace(refresh_s=0.0, patience_s=10.0)


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def three_machines(units: int = 600) -> LoaderPlan:
    plan = loader_plan(units, units)
    return plan.model_copy(update={"machines": 3, "sizes": plan.sizes.model_copy(update={"machines": 3})})


def commit(store: MemoryStore, plan: LoaderPlan, segment: SegmentId, *, by: int | None = None) -> None:
    owner = owner_of(*segment, machines=plan.machines)
    made = record(plan, *segment, length=plan.units, is_last_epoch=True)
    put(store, made.model_copy(update={"machine": owner if by is None else by}))


def work(store: MemoryStore, plan: LoaderPlan, machine: int, clock: Callable[[], float] | None = None) -> Work:
    progress = Progress(store, KEYS, plan)
    progress.refresh()
    return Work(plan, progress, machine=machine, clock=clock or Clock(), pace=PACE)


def test_machines_share_all_segments_without_overlap(memory_store: MemoryStore) -> None:
    plan = three_machines()
    shares = [[s.id for s in work(memory_store, plan, machine).own()] for machine in range(3)]
    # nothing is committed here, so a machine also redoes what lags rounds behind it
    own = [[s for s in share if owner_of(*s, machines=3) == machine] for machine, share in enumerate(shares)]
    assert sorted(own[0] + own[1] + own[2]) == list(segments_in_order(plan))


def test_what_is_committed_is_skipped_and_counted(memory_store: MemoryStore) -> None:
    plan = three_machines(100)
    for segment in list(segments_in_order(plan))[:7]:
        commit(memory_store, plan, segment)
    mine = work(memory_store, plan, 0)
    assert [s.id for s in mine.own()] == [s for s in segments_in_order(plan) if s[1] % 3 == 0][3:]
    assert mine.num_skipped == 3


def test_a_machine_rounds_ahead_redoes_the_lowest_missing_segment_once(memory_store: MemoryStore) -> None:
    plan = three_machines(3000)
    order: list[SegmentId] = []
    clock = Clock()
    machines = [work(memory_store, plan, machine, clock).own() for machine in (0, 1)]
    for _ in range(60):  # machine 2 never does anything
        for place, own in enumerate(machines):
            segment = next(own, None)
            if segment is not None:
                order.append(segment.id)
                commit(memory_store, plan, segment.id, by=place)
    redone = [s for s in order if owner_of(*s, machines=3) == 2]
    missing = [s for s in segments_in_order(plan) if owner_of(*s, machines=3) == 2]
    assert redone == missing[: len(redone)]  # the lowest first, none twice
    assert len(redone) >= 10


def test_only_a_stalled_machines_segments_are_redone_in_the_end(memory_store: MemoryStore) -> None:
    plan, clock = three_machines(200), Clock()
    missing = [s for s in segments_in_order(plan) if owner_of(*s, machines=3) == 2]
    for segment in segments_in_order(plan):
        if segment not in missing:
            commit(memory_store, plan, segment)
    mine = work(memory_store, plan, 0, clock)
    assert list(mine.own()) == []
    assert mine.to_redo() is None
    clock.now += 9
    commit(memory_store, plan, missing[0])  # machine 2 lives
    assert mine.to_redo() is None
    clock.now += 9
    assert mine.to_redo() is None
    clock.now += 2
    found = mine.to_redo()
    assert found is not None
    assert found.id in missing[1:]


def test_helpers_take_turns_and_do_everything_together(memory_store: MemoryStore) -> None:
    plan, clock = three_machines(400), Clock()
    missing = [s for s in segments_in_order(plan) if owner_of(*s, machines=3) == 2]
    for segment in segments_in_order(plan):
        if segment not in missing:
            commit(memory_store, plan, segment)
    helpers = [work(memory_store, plan, machine, clock) for machine in (0, 1)]
    for helper in helpers:
        assert helper.to_redo() is None
    clock.now += 10
    taken: list[SegmentId] = []
    while len(taken) < len(missing):
        for machine, helper in enumerate(helpers):
            segment = helper.to_redo()
            if segment is not None:
                taken.append(segment.id)
                commit(memory_store, plan, segment.id, by=machine)
        assert clock.now < 1000
    assert sorted(taken) == missing  # no segment by both, as each had its turn, and no waiting in between


def test_a_slow_segment_here_makes_patient(memory_store: MemoryStore) -> None:
    plan, clock = three_machines(50), Clock()
    mine = work(memory_store, plan, 0, clock)
    mine.note_seconds(20.0)
    assert mine.to_redo() is None
    clock.now += 59
    assert mine.to_redo() is None
    clock.now += 70
    assert mine.to_redo() is not None


def test_a_single_machine_redoes_nothing(memory_store: MemoryStore) -> None:
    plan = loader_plan(100)
    plan = plan.model_copy(update={"machines": 1, "sizes": plan.sizes.model_copy(update={"machines": 1})})
    mine = work(memory_store, plan, 0)
    assert [s.id for s in mine.own()] == list(segments_in_order(plan))
    assert mine.to_redo() is None


def test_the_last_segment_carries_padding_to_a_multiple_of_32_cyclically(memory_store: MemoryStore) -> None:
    plan = loader_plan(5, 5)
    *_, last = [s for machine in (0, 1) for s in work(memory_store, plan, machine).own()]
    assert (last.start, last.stop) == (4, 5)
    assert last.padding == tuple(place % 5 for place in range(27))
    assert last.last_of_units
    assert last.num_elements == 28


# --- progress -------------------------------------------------------------------------------------------------------


def test_progress_lists_only_what_is_behind_the_contiguous_prefix(memory_store: MemoryStore) -> None:
    plan = three_machines(300)
    progress = Progress(memory_store, KEYS, plan)
    segments = list(segments_in_order(plan))
    for segment in [*segments[:4], segments[6]]:
        commit(memory_store, plan, segment)
    assert progress.frontier == segments[0]
    progress.refresh()
    assert progress.frontier == segments[4]
    assert [segment for segment in segments if progress.has(segment)] == [*segments[:4], segments[6]]
    assert progress.missing(3) == [segments[4], segments[5], segments[7]]
    assert committed_segments(memory_store, KEYS, "data", behind=segments[3]) == {segments[6]}
    assert progress.machine_of(segments[6]) == owner_of(*segments[6], machines=3)
    assert progress.machine_of(segments[5]) is None


def test_progress_is_complete_with_the_last_segment(memory_store: MemoryStore) -> None:
    plan = three_machines(300)
    progress = Progress(memory_store, KEYS, plan)
    for segment in reversed(list(segments_in_order(plan))):
        assert not progress.is_complete
        progress.note(segment)
    assert progress.is_complete
    assert progress.frontier is None
    assert progress.has((99, 99))
    assert progress.missing(5) == []
