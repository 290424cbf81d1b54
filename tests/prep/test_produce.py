from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from taas.errors import ElementError, LoaderError, RunCancelled, StoreUnavailable
from taas_tasks.layout import RunKeys
from taas_tasks.plan import owner_of
from taas_tasks.prep.elements import element_seeded
from taas_tasks.prep.produce import Tally
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import Plan
from tests.prep import cases, oracle

KINDS = {**cases.MAP_LOADERS, **cases.ITERABLE_LOADERS}
KEYS = RunKeys(cases.RUN)
Make = Callable[[], DataLoader[Any]]


class FaultyStore(MemoryStore):
    """Fails from the given write on, as a killed process would; what it wrote before stays in ``shared``."""

    def __init__(self, shared: MemoryStore, *, writes: int) -> None:
        super().__init__()
        self._objects = shared._objects
        self._lock = shared._lock
        self._writes = writes

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._count()
        super().put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._count()
        return super().put_if_absent(key, data)

    def _count(self) -> None:
        self._writes -= 1
        if self._writes < 0:
            raise StoreUnavailable("killed")


def all_machines(store: MemoryStore, make: Make, plan: Plan, **more: Any) -> list[Tally]:
    machines = cases.loader_plan_of(plan).machines
    with ThreadPoolExecutor(machines) as pool:
        return list(pool.map(lambda m: cases.prepare(store, make, plan, machine=m, **more), range(machines)))


def assert_committed(store: MemoryStore, make: Make, plan: Plan, **more: Any) -> None:
    stored = oracle.committed_stream(store, cases.RUN, "data")
    units = cases.loader_plan_of(plan).units
    oracle.assert_same_stream(stored.stream, oracle.local_stream(make(), seed=plan.seed, units=units, **more))
    oracle.assert_padding(stored)
    named = {record.key for record in oracle.records_of(store, cases.RUN, "data")}
    assert named <= {info.key for info in store.list(f"{KEYS.root}shards/")}


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(sorted(KINDS)),
    size=st.integers(1, 70),
    units=st.integers(1, 100),
    machines=st.integers(1, 4),
    seed=st.integers(0, 2**40),
    first=st.sampled_from([2, 8, 32]),
    killed_after=st.integers(0, 12),
)
def test_the_committed_stream_is_the_one_torch_yields_in_one_process(
    kind: str, size: int, units: int, machines: int, seed: int, first: int, killed_after: int
) -> None:
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        return KINDS[kind](size)

    plan = cases.plan_of(
        store, make, units=units, machines=machines, seed=seed, sizes={"first": first, "largest": max(first, 64)}
    )
    try:
        cases.prepare(FaultyStore(store, writes=killed_after), make, plan)
    except StoreUnavailable:
        done = len(oracle.records_of(store, cases.RUN, "data"))
        assert cases.prepare(store, make, plan, generation=2).skipped >= min(done, 1)
    for machine in range(1, cases.loader_plan_of(plan).machines):
        cases.prepare(store, make, plan, machine=machine)
    assert_committed(store, make, plan)


@pytest.mark.parametrize("kind", ["shuffled", "a sampler of the user's", "set_epoch", "epochs that differ"])
def test_machines_that_run_at_once_commit_every_segment_once(kind: str) -> None:
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        return KINDS[kind](60)

    plan = cases.plan_of(store, make, units=400, machines=4, sizes={"first": 8, "largest": 16})
    tallies = all_machines(store, make, plan)
    assert_committed(store, make, plan)
    assert sum(tally.committed for tally in tallies) == len(oracle.records_of(store, cases.RUN, "data"))
    assert len(list(store.list(f"{KEYS.root}shards/"))) == sum(tally.committed for tally in tallies)


def test_two_machines_that_race_for_all_segments_lose_and_double_nothing() -> None:
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        return DataLoader(cases.Squares(200), batch_size=2)

    plan = cases.plan_of(store, make, units=100, machines=1, sizes={"first": 8, "largest": 8})
    barrier = threading.Barrier(2)

    def one(generation: int) -> Tally:
        barrier.wait()
        return cases.prepare(store, make, plan, generation=generation)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, [1, 2])
    assert first.committed + second.committed == 13
    assert first.redone + second.redone + first.skipped + second.skipped == 13
    assert first.notes == second.notes == []
    assert_committed(store, make, plan)
    assert len(list(store.list(f"{KEYS.root}shards/"))) == 13


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("kind", ["shuffled", "no batches", "batches", "set_epoch", "a sampler of the user's"])
def test_loader_workers_give_the_same_stream_over_several_epochs(kind: str, num_workers: int) -> None:
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        loader = KINDS[kind](30)
        vars(loader).update(num_workers=num_workers, prefetch_factor=2)
        return loader

    plan = cases.plan_of(store, make, units=70, machines=1)
    assert cases.prepare(store, make, plan).notes == []
    assert_committed(store, make, plan)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_values_are_those_of_the_loader_with_the_same_seeding_in_one_process(num_workers: int) -> None:
    def make(workers: int = num_workers) -> DataLoader[Any]:
        return DataLoader(cases.Noisy(25), batch_size=3, shuffle=True, num_workers=workers)

    streams = []
    for machines in (1, 3):
        store = MemoryStore()
        plan = cases.plan_of(store, make, units=40, machines=machines, seed=11, sizes={"first": 2, "largest": 4})
        for machine in range(machines):
            cases.prepare(store, make, plan, machine=machine, generation=machine + 1)
        streams.append(oracle.committed_stream(store, cases.RUN, "data"))
        oracle.assert_padding(streams[-1])
    oracle.assert_same_stream(streams[1].stream, streams[0].stream)
    loader = make(0)
    seeded = element_seeded(loader, seed=11)
    wanted = oracle.local_stream(loader, seed=11, units=40, passes=lambda: iter(seeded))
    oracle.assert_same_stream(streams[0].stream, wanted)


def test_fewer_elements_than_lanes_are_padded_to_one_step_of_32() -> None:
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        return DataLoader(cases.Squares(3))

    plan = cases.plan_of(store, make, units=3)
    cases.prepare(store, make, plan)
    assert_committed(store, make, plan)
    (record,) = oracle.records_of(store, cases.RUN, "data")
    assert (record.num_padding, record.last_of_units, record.epoch_length) == (29, True, 3)


def test_one_machine_does_the_work_of_one_that_never_came() -> None:
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        return DataLoader(cases.Squares(300))

    plan = cases.plan_of(store, make, units=300, machines=3, sizes={"first": 8, "largest": 16})
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda m: cases.prepare(store, make, plan, machine=m), [0, 2]))
    assert_committed(store, make, plan)
    records = oracle.records_of(store, cases.RUN, "data")
    helped = {r.machine for r in records if owner_of(r.epoch, r.n, machines=3) == 1}
    assert helped <= {0, 2}


def test_an_aborted_run_ends_the_preparation_and_keeps_what_is_there() -> None:
    store = MemoryStore()
    store.put(KEYS.abort, b"{}")

    def make() -> DataLoader[Any]:
        return DataLoader(cases.Squares(10))

    plan = cases.plan_of(store, make, units=10)
    with pytest.raises(RunCancelled, match="the run was aborted"):
        cases.prepare(store, make, plan)
    assert oracle.records_of(store, cases.RUN, "data") == []


def test_a_nondeterministic_dataset_is_noted_when_two_results_differ() -> None:
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        return DataLoader(Restless(64))

    plan = cases.plan_of(store, make, units=64, sizes={"first": 32, "largest": 32})
    with ThreadPoolExecutor(2) as pool:
        barrier = threading.Barrier(2)

        def one(generation: int) -> Tally:
            barrier.wait()
            return cases.prepare(store, make, plan, generation=generation)

        tallies = list(pool.map(one, [1, 2]))
    redone = sum(tally.redone for tally in tallies)
    notes = [note for tally in tallies for note in tally.notes]
    assert len(notes) == redone
    assert all("loader 'data' is not deterministic: segment" in note for note in notes)


class Restless(cases.Squares):
    """Gives another value every time."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return time.perf_counter_ns()


# --- the user's errors ----------------------------------------------------------------------------------------------


class Broken(cases.Squares):
    def __getitem__(self, index: int) -> Any:
        if index == 45:
            raise ValueError("no picture 45")
        return super().__getitem__(index)


class KilledAt(cases.Squares):
    """Its loader worker is killed as the kernel kills for want of memory."""

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def refuse(worker_id: int) -> None:
    raise RuntimeError("no licence for a worker")


def failing(dataset: cases.Squares, num_workers: int = 0, **more: Any) -> tuple[MemoryStore, pytest.ExceptionInfo[Any]]:
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=2, num_workers=num_workers, **more)

    plan = cases.plan_of(store, make, units=30, sizes={"first": 8, "largest": 8})
    with pytest.raises((LoaderError, ElementError)) as caught:
        cases.prepare(store, make, plan)
    return store, caught


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_the_dataset_names_loader_element_indices_host_and_traceback(num_workers: int) -> None:
    store, caught = failing(Broken(60), num_workers)
    error = caught.value
    assert error.message == (
        "loader 'data' raised ValueError: no picture 45 at element 22 of epoch 0 (dataset indices [44, 45], on c1-0)"
    )
    assert error.fields["index"] == 22
    assert error.fields["host"] == "c1-0"
    assert 'raise ValueError("no picture 45")' in error.fields["traceback"]
    assert [record.n for record in oracle.records_of(store, cases.RUN, "data")] == [0, 1]


def test_a_loader_worker_that_is_killed_is_a_readable_error() -> None:
    _, caught = failing(KilledAt(60), 2)
    assert "a loader worker was killed: most often the kernel does that for want of memory" in caught.value.message
    assert "of epoch 0 was awaited" in caught.value.message


def test_a_worker_init_fn_that_raises_is_a_readable_error() -> None:
    _, caught = failing(cases.Squares(60), 2, worker_init_fn=refuse)
    assert "no licence for a worker" in caught.value.message
    assert "loader 'data'" in caught.value.message


class OwnIter(DataLoader[Any]):
    """Read in sequence: it has an ``__iter__`` of its own."""

    def __iter__(self) -> Any:
        return (element for element in super().__iter__())


class Full(MemoryStore):
    """A store that takes nothing any more once it is full."""

    is_full = False

    def put(self, key: str, data: Any) -> None:
        if self.is_full:
            raise StoreUnavailable("the store is full")
        super().put(key, data)


@pytest.mark.parametrize("kind", [DataLoader, OwnIter])
def test_an_error_leaves_no_loader_worker_behind(kind: type[DataLoader[Any]]) -> None:
    store = Full()

    def make() -> DataLoader[Any]:
        return kind(cases.Squares(60), batch_size=2, num_workers=2)

    plan = cases.plan_of(store, make, units=30, sizes={"first": 1, "largest": 1})
    store.is_full = True
    before = set(multiprocessing.active_children())
    with pytest.raises(StoreUnavailable) as caught:
        cases.prepare(store, make, plan)
    assert set(multiprocessing.active_children()) <= before, caught.value  # which holds the frames of its traceback


def test_a_dataset_that_is_shorter_than_inspected_is_an_error() -> None:
    store = MemoryStore()
    plan = cases.plan_of(store, lambda: DataLoader(cases.Squares(50)), units=50)
    with pytest.raises(LoaderError, match="gives 40 elements in epoch 0, 50 were found when it was inspected"):
        cases.prepare(store, lambda: DataLoader(cases.Squares(40)), plan)
