from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from taas.errors import LoaderError
from taas_tasks.store.memory import MemoryStore
from tests.prep import cases, oracle


def prepared(
    make: Callable[[], DataLoader[Any]], *, units: int, randomness: str = "element", **more: Any
) -> MemoryStore:
    store = MemoryStore()
    plan = cases.plan_of(store, make, units=units, seed=3, randomness=randomness, **more)
    assert cases.loader_plan_of(plan).machines == 1
    cases.prepare(store, make, plan)
    return store


def assert_local(store: MemoryStore, make: Callable[[], DataLoader[Any]], *, units: int) -> oracle.Stored:
    stored = oracle.committed_stream(store, cases.RUN, "data")
    oracle.assert_same_stream(stored.stream, oracle.local_stream(make(), seed=3, units=units))
    oracle.assert_padding(stored)
    return stored


@pytest.mark.parametrize("batch_size", [None, 3])
def test_an_iterable_without_loader_workers_is_bitwise_the_local_stream(batch_size: int | None) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(cases.Numbers(40, draws=True), batch_size=batch_size)

    store = prepared(make, units=60, sizes={"first": 8, "largest": 16})
    assert len({item.epoch for item in assert_local(store, make, units=60).stream}) >= 2


def test_exact_gives_what_a_map_style_loader_draws_in_one_process() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(cases.Noisy(20), batch_size=3, shuffle=True)

    assert_local(prepared(make, units=25, randomness="exact"), make, units=25)


class Tells(IterableDataset[Any]):
    """Its epochs differ in length and claim another one."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.epoch * 1000, self.epoch * 1000 + 5 + 30 * self.epoch)


def test_an_epoch_is_as_long_as_an_iteration_yields_and_set_epoch_is_called() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Tells(), batch_size=None)

    store = prepared(make, units=60, sizes={"first": 8, "largest": 8})
    stored = assert_local(store, make, units=60)
    last = [record for record in oracle.records_of(store, cases.RUN, "data") if record.last_of_epoch]
    assert [(record.epoch, record.epoch_length, record.last_of_units) for record in last] == [
        (0, 5, False),
        (1, 35, False),
        (2, 20, True),
    ]
    assert len(stored.padding[0]) == 27


def test_an_epoch_that_ends_with_a_segment_is_marked_on_that_segment() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(cases.Numbers(32), batch_size=None)

    store = prepared(make, units=64, sizes={"first": 16, "largest": 16})
    assert_local(store, make, units=64)
    assert [r.last_of_epoch for r in oracle.records_of(store, cases.RUN, "data")] == [False, True, False, True]


class Once(IterableDataset[Any]):
    """Can be iterated once only."""

    def __init__(self) -> None:
        self.numbers = iter(range(7))

    def __iter__(self) -> Iterator[Any]:
        return self.numbers


def test_an_empty_epoch_is_an_error_that_tells_what_is_missing() -> None:
    with pytest.raises(LoaderError, match="yields nothing in epoch 1: 13 of 20 units are missing"):
        prepared(lambda: DataLoader(Once(), batch_size=None), units=20)


class Breaks(cases.Numbers):
    def __iter__(self) -> Iterator[Any]:
        yield from [torch.tensor(n) for n in range(5)]
        raise OSError("the stream was cut")


def test_an_exception_names_loader_and_awaited_element() -> None:
    with pytest.raises(LoaderError, match="the stream was cut") as caught:
        prepared(lambda: DataLoader(Breaks(9), batch_size=None), units=20)
    assert "loader 'data'" in caught.value.message
    assert "element 5 of epoch 0 was awaited (on c1-0)" in caught.value.message
    assert 'raise OSError("the stream was cut")' in caught.value.message + caught.value.fields["traceback"]


class Counting(cases.Numbers):
    """Counts how many elements were read in all."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            Counting.read += 1
            yield element


def test_a_retry_reads_again_and_commits_only_what_is_missing() -> None:
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        return DataLoader(cases.Numbers(50, draws=True), batch_size=2)

    plan = cases.plan_of(store, make, units=60, seed=3, sizes={"first": 8, "largest": 8})
    cases.prepare(store, make, plan)
    before = oracle.records_of(store, cases.RUN, "data")
    for record in before[2:5]:
        store.delete(f"runs/{cases.RUN}/ledger/data/{record.epoch:06d}/0000/{record.n:08d}.json")
    tally = cases.prepare(store, make, plan, generation=2)
    assert (tally.committed, tally.skipped) == (3, len(before) - 3)
    assert_local(store, make, units=60)
    assert {r.generation for r in oracle.records_of(store, cases.RUN, "data")} == {1, 2}


def test_an_infinite_loader_is_not_read_further_than_the_units() -> None:
    Counting.read = 0
    prepared(lambda: DataLoader(Counting(None), batch_size=None), units=37)
    assert Counting.read == 37


class OneBuffer(IterableDataset[Any]):
    """Yields the same tensor and dict again and again, changed."""

    def __iter__(self) -> Iterator[Any]:
        element = {"x": torch.zeros(3), "n": 0}
        for number in range(10):
            element["x"] += 1
            element["n"] = number
            yield element


def test_a_dataset_that_reuses_its_buffer_is_stored_as_it_was_at_each_yield() -> None:
    store = prepared(lambda: DataLoader(OneBuffer(), batch_size=None), units=10)
    stream = oracle.committed_stream(store, cases.RUN, "data").stream
    assert [(item.element["n"], float(item.element["x"][0])) for item in stream] == [(n, n + 1.0) for n in range(10)]


class OwnIter(DataLoader[Any]):
    """A loader with an __iter__ of its own."""

    def __iter__(self) -> Any:
        return (element * 10 for element in super().__iter__())


def test_a_loader_class_with_its_own_iter_is_read_in_sequence() -> None:
    def make() -> DataLoader[Any]:
        return OwnIter([1, 2, 3], batch_size=1, shuffle=True)

    assert_local(prepared(make, units=9), make, units=9)


class Unseeded(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(64):
            yield float(number) + random.SystemRandom().random() + time.time()


def test_exact_refuses_results_that_differ() -> None:
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        return DataLoader(Unseeded(), batch_size=None)

    plan = cases.plan_of(store, make, units=64, randomness="exact", sizes={"first": 32, "largest": 32})
    other = MemoryStore()
    cases.prepare(other, make, plan)
    late = LateStore(store, other)
    with pytest.raises(LoaderError, match='cannot be prepared with randomness "exact"'):
        cases.prepare(late, make, plan)


class LateStore(MemoryStore):
    """Another try's records appear just before ours are put."""

    def __init__(self, mine: MemoryStore, others: MemoryStore) -> None:
        super().__init__()
        self._objects = mine._objects
        self._others = others

    def put_if_absent(self, key: str, data: bytes) -> bool:
        record = oracle.ShardRecord.model_validate_json(self._others.get(key))
        self._objects[key] = (record.model_copy(update={"key": "elsewhere"}).to_bytes(), 0.0)
        return super().put_if_absent(key, data)


class BusyStore(MemoryStore):
    """Takes its time to write a segment, and tells when it does."""

    is_writing = False

    def put(self, key: str, data: Any) -> None:
        self.is_writing = True
        time.sleep(0.1)
        super().put(key, data)
        self.is_writing = False


class OwnIteration(DataLoader[Any]):
    """Has an ``__iter__`` of its own, so it is read by one process; its loader workers are torch's."""

    def __iter__(self) -> Any:
        return super().__iter__()


def test_loader_workers_of_later_epochs_are_forked_while_nothing_is_written(tmp_path: Path) -> None:
    store, told = BusyStore(), tmp_path / "told"

    def note(_: int) -> None:  # in the loader worker: the store is as it was when the process was forked
        with told.open("a") as file:
            file.write(f"{store.is_writing} ")

    def make() -> DataLoader[Any]:
        return OwnIteration(cases.Squares(4), num_workers=1, worker_init_fn=note)

    plan = cases.plan_of(store, make, units=16, seed=3)
    told.unlink(missing_ok=True)
    cases.prepare(store, make, plan)
    assert told.read_text().split() == ["False"] * 4
    assert_local(store, make, units=16)
