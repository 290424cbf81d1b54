from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from taas.errors import ElementError, LoaderError
from taas_tasks.prep.inspect_loader import inspect_loader
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import Inspection
from tests.prep import cases, oracle, stream_cases


def inspected(make: Callable[[], DataLoader[Any]], *, units: int = 50, store: Any = None, **more: Any) -> Inspection:
    values: dict[str, Any] = {"seed": 0, "randomness": "element", "allow_pickle": False} | more
    return inspect_loader(make, producer=cases.producer(0), store=store or MemoryStore(), units=units, **values)


def test_a_map_style_loader_is_measured_and_its_order_is_a_recipe() -> None:
    found = inspected(lambda: DataLoader(cases.Squares(100), batch_size=4, shuffle=True))
    assert (found.kind, found.order, found.epoch_length, found.claimed_length) == ("map", "recipe", 25, 25)
    assert (found.num_loader_workers, found.batch_size, found.sampled_elements) == (0, 4, 16)
    assert found.warnings == []
    assert found.element_seconds > 0
    assert found.versions.torch == torch.__version__
    assert set(found.versions.packages) == {"numpy", "pyarrow", "cloudpickle"}
    assert Inspection.model_validate_json(found.to_bytes()) == found


def test_the_bytes_of_an_element_are_measured_without_what_a_shard_costs_by_itself() -> None:
    found = inspected(lambda: DataLoader(Wide(100), batch_size=2))
    assert 2 * 4000 <= found.element_bytes <= 2 * 4000 + 200


class Wide(cases.Squares):
    def __getitem__(self, index: int) -> Any:
        return torch.full((1000,), index, dtype=torch.float32)


def test_a_sampler_of_the_users_is_written_and_its_claim_is_checked() -> None:
    store = MemoryStore()
    found = inspected(lambda: cases.MAP_LOADERS["a sampler of the user's"](20), store=store)
    assert (found.order, found.epoch_length, found.order_num_epochs) == ("chunks", 10, 5)
    assert len(list(store.list(f"runs/{cases.RUN}/order/data/"))) == 5
    assert found.warnings == ["len() claims 12 elements, an iteration yields 10; what it yields counts"]


def test_epochs_that_differ_are_listed() -> None:
    found = inspected(lambda: cases.MAP_LOADERS["epochs that differ"](20), units=40)
    assert (found.epoch_length, found.epoch_lengths) == (None, [20, 13, 6, 1])


def test_an_infinite_sampler_has_one_epoch_of_the_units() -> None:
    found = inspected(lambda: cases.MAP_LOADERS["an infinite sampler"](20), units=40)
    assert (found.epoch_length, found.order_num_epochs) == (40, 1)


def test_an_iterable_is_sequential_and_its_length_is_not_known() -> None:
    found = inspected(lambda: DataLoader(cases.Numbers(30, draws=True), batch_size=2, num_workers=1))
    assert (found.kind, found.order, found.epoch_length) == ("iterable", "sequential", None)
    assert found.warnings == []


def test_exact_without_loader_workers_is_sequential_and_says_so() -> None:
    found = inspected(lambda: DataLoader(cases.Noisy(30)), randomness="exact")
    assert (found.kind, found.order, found.read_by) == ("map", "sequential", "process")
    assert any("read in sequence by one machine" in text for text in found.warnings)


def test_the_workers_of_an_exact_loader_are_its_streams() -> None:
    found = inspected(lambda: DataLoader(cases.Noisy(30), shuffle=True, num_workers=2), randomness="exact")
    assert (found.kind, found.order, found.read_by, found.num_streams) == ("map", "recipe", "workers", 2)
    assert (found.epoch_length, found.is_shared, found.has_position) == (30, True, False)
    assert found.warnings == []


def test_the_base_seeds_of_an_exact_loader_with_a_sampler_of_the_users_are_recorded() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(cases.Noisy(20), sampler=cases.OddFirst(20), num_workers=1)

    found = inspected(make, randomness="exact")
    assert (found.order, found.read_by, found.epoch_length, len(found.base_seeds)) == ("chunks", "workers", 20, 3)
    assert inspected(make).base_seeds == []


def test_an_exact_loader_out_of_order_is_refused() -> None:
    with pytest.raises(LoaderError, match="in_order=False gives another order each time"):
        inspected(lambda: DataLoader(cases.Noisy(9), num_workers=1, in_order=False), randomness="exact")


def test_a_data_pipe_is_read_by_a_process() -> None:
    pipe = pytest.importorskip("torch.utils.data.datapipes.iter").IterableWrapper(range(9))
    found = inspected(lambda: DataLoader(pipe, batch_size=3, num_workers=1))
    assert (found.order, found.read_by, found.num_streams) == ("sequential", "process", 1)


def test_the_workers_of_an_iterable_are_its_streams() -> None:
    found = inspected(stream_cases.ITERABLES["aware in batches"])
    assert (found.kind, found.order, found.read_by, found.num_streams) == ("iterable", "sequential", "workers", 2)
    assert (found.epoch_length, found.is_shared, found.has_position, found.warnings) == (None, True, False, [])


def test_an_iterable_that_asks_for_no_worker_info_is_told_to_come_several_times() -> None:
    found = inspected(stream_cases.ITERABLES["unaware"])
    assert (found.read_by, found.num_streams, found.is_shared) == ("workers", 2, False)
    (warning,) = found.warnings
    assert "each element comes 2 times" in warning
    assert "get_worker_info() (its id and num_workers), or use num_workers=0" in warning


def split_by_closure(worker_id: int) -> None:
    PART.numbers = PART.numbers[worker_id::2]


PART = stream_cases.Split(20)


def seeds_alone(worker_id: int) -> None:
    random.seed(worker_id)


@pytest.mark.parametrize(
    ("worker_init_fn", "is_shared"), [(stream_cases.take_part, True), (split_by_closure, True), (seeds_alone, False)]
)
def test_a_worker_init_fn_shares_by_what_it_asks_or_by_what_comes_of_it(worker_init_fn: Any, is_shared: bool) -> None:
    found = inspected(lambda: DataLoader(PART, batch_size=None, num_workers=2, worker_init_fn=worker_init_fn))
    assert found.is_shared == is_shared


@pytest.mark.parametrize("kind", ["a state", "a state of the iterator"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_state_that_continues_the_stream_is_a_position(kind: str) -> None:
    found = inspected(stream_cases.ITERABLES[kind])
    assert (found.has_position, found.warnings) == (True, [])


class Unreadable(stream_cases.Resumable):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"object": self}


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (stream_cases.Resumable(20, is_true=False), "what it yields behind element 5 differs"),
        (Unreadable(20), "UnpicklingError"),
    ],
)
def test_a_state_that_does_not_continue_the_stream_is_told(dataset: Any, reason: str) -> None:
    found = inspected(lambda: DataLoader(dataset, batch_size=None, num_workers=1))
    assert not found.has_position
    (warning,) = found.warnings
    assert warning.startswith("its state_dict does not continue its stream")
    assert reason in warning


def test_loader_workers_that_stay_have_no_position() -> None:
    found = inspected(lambda: DataLoader(stream_cases.Resumable(9), num_workers=1, persistent_workers=True))
    assert (found.has_position, found.warnings) == (False, [])


def test_values_seeded_per_element_are_equal_in_two_processes() -> None:
    assert inspected(lambda: DataLoader(cases.Noisy(30), num_workers=2)).warnings == []


class ByProcess(cases.Squares):
    """Gives another value in every process."""

    def __getitem__(self, index: int) -> Any:
        return os.getpid()


class ByCall(cases.Squares):
    """Gives another value at every call."""

    calls = itertools.count()

    def __getitem__(self, index: int) -> Any:
        return next(self.calls)


class Counter(cases.Numbers):
    calls = itertools.count()

    def __iter__(self) -> Any:
        return iter([next(self.calls)] * 5)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: DataLoader(ByProcess(30)), 'ask for randomness "exact"'),
        (lambda: DataLoader(ByCall(30)), 'ask for randomness "exact"'),
        (lambda: DataLoader(Counter(5)), 'ask for randomness "exact"'),
    ],
)
def test_elements_that_differ_when_loaded_again_are_warned_of(make: Callable[[], DataLoader[Any]], advice: str) -> None:
    (warning,) = inspected(make).warnings
    assert warning.startswith("the same elements loaded twice differ")
    assert advice in warning


class Odd(cases.Squares):
    def __getitem__(self, index: int) -> Any:
        return {"ok": 1, "bad": {1, 2}}


def test_what_fits_no_column_is_refused_with_its_path_or_pickled_and_told() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Odd(5), batch_size=None)

    with pytest.raises(ElementError, match=r"loader 'data': element\['bad'\]"):
        inspected(make)
    (warning,) = inspected(make, allow_pickle=True).warnings
    assert warning == "stored pickled, which is slow and runs code where it is read: element['bad']"


@pytest.mark.parametrize("make", [lambda: DataLoader([]), lambda: DataLoader(cases.Numbers(0))])
def test_a_loader_that_yields_nothing_is_an_error(make: Callable[[], DataLoader[Any]]) -> None:
    with pytest.raises(LoaderError, match="loader 'data' yields nothing"):
        inspected(make)


class Broken(cases.Squares):
    def __getitem__(self, index: int) -> Any:
        raise ValueError("no picture")


def test_an_exception_of_the_dataset_names_the_element() -> None:
    with pytest.raises(LoaderError, match="raised ValueError: no picture at element 0 of epoch 0"):
        inspected(lambda: DataLoader(Broken(5)))


class BrokenInWorker(cases.Squares):
    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            raise ValueError("only here")
        return index


def test_a_loader_without_workers_need_not_work_in_them() -> None:
    (warning,) = inspected(lambda: DataLoader(BrokenInWorker(5))).warnings
    assert warning.startswith("loading the same elements in a second process failed")
    with pytest.raises(LoaderError, match="only here"):
        inspected(lambda: DataLoader(BrokenInWorker(5), num_workers=1))


class DrawsFrom(cases.Squares):
    """Draws from a generator that it is given."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        super().__init__(size)
        self.generator = generator

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1, generator=self.generator)


def _with_generators(*, num_workers: int, is_shared: bool) -> DataLoader[Any]:
    one = cases.generator(1)
    dataset = DrawsFrom(12, one if is_shared else cases.generator(2))
    return DataLoader(dataset, shuffle=True, generator=one, num_workers=num_workers)


def _is_bitwise_local(make: Callable[[], DataLoader[Any]]) -> bool:
    store = MemoryStore()
    cases.prepare(store, make, cases.plan_of(store, make, units=12, randomness="exact"))
    stream = oracle.committed_stream(store, cases.RUN, "data").stream
    local = oracle.local_stream(make(), seed=0, units=12)
    return all(oracle.equal(mine.element, theirs.element) for mine, theirs in zip(stream, local, strict=True))


@pytest.mark.parametrize(("num_workers", "is_shared"), [(2, True), (2, False), (0, True), (0, False)])
def test_a_generator_that_loader_and_dataset_share_is_warned_of_where_it_is_not_exact(
    num_workers: int, is_shared: bool
) -> None:
    def make() -> DataLoader[Any]:
        return _with_generators(num_workers=num_workers, is_shared=is_shared)

    found = inspected(make, units=12, randomness="exact")
    is_warned = any(
        "its dataset holds the generator that its loader or sampler draws from" in w for w in found.warnings
    )
    assert is_warned == (num_workers > 0 and is_shared)
    assert _is_bitwise_local(make) == (not is_warned)


def test_a_list_is_a_dataset_too() -> None:
    listed: Any = list(range(12))
    assert inspected(lambda: DataLoader(listed, num_workers=1), units=12, randomness="exact").num_streams == 1
