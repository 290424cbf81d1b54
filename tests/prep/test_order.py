from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler

from taas.errors import LoaderError
from taas_tasks.layout import RunKeys
from taas_tasks.prep.order import RecipeOrder, is_recipe
from taas_tasks.prep.order_chunks import ChunkOrder, write_lost_chunks, write_order
from taas_tasks.store.memory import MemoryStore
from tests.prep import cases

RECIPES = sorted(name for name, make in cases.MAP_LOADERS.items() if is_recipe(make(5)))
CUSTOM = sorted(set(cases.MAP_LOADERS) - set(RECIPES))


class Indices(cases.Squares):
    """Gives back the index it is asked for."""

    def __getitem__(self, index: Any) -> Any:
        return index


def recorded(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Let a loader yield its rows in place of elements; everything else about it stays."""
    vars(loader).update(dataset=Indices(10**9), collate_fn=_rows)  # torch refuses to set them one by one
    return loader


def _rows(rows: Any) -> Any:
    return rows


def as_torch_orders(loader: DataLoader[Any], *, seed: int, epochs: int, limit: int = 10**9) -> list[list[Any]]:
    torch.manual_seed(seed)
    found = []
    for _ in range(epochs):
        rows = []
        for row in recorded(loader):
            rows.append(row)
            if len(rows) == limit:
                break
        found.append(rows)
    return found


@settings(deadline=None, max_examples=150)
@given(kind=st.sampled_from(RECIPES), size=st.integers(1, 80), seed=st.integers(0, 2**40), epochs=st.integers(1, 4))
def test_a_recipe_gives_id_for_id_what_torch_yields(kind: str, size: int, seed: int, epochs: int) -> None:
    wanted = as_torch_orders(cases.MAP_LOADERS[kind](size), seed=seed, epochs=epochs)
    order = RecipeOrder(cases.MAP_LOADERS[kind](size), seed=seed)
    assert [order.rows(epoch, 0, 10**9) for epoch in range(epochs)] == wanted
    assert {len(rows) for rows in wanted} == {order.epoch_length}


@settings(deadline=None, max_examples=60)
@given(kind=st.sampled_from(RECIPES), size=st.integers(1, 60), data=st.data())
def test_any_stretch_of_any_epoch_can_be_asked_for_at_any_time(kind: str, size: int, data: st.DataObject) -> None:
    straight = RecipeOrder(cases.MAP_LOADERS[kind](size), seed=1)
    wanted = [straight.rows(epoch, 0, 10**9) for epoch in range(20)]
    order = RecipeOrder(cases.MAP_LOADERS[kind](size), seed=1)
    for _ in range(8):
        epoch = data.draw(st.integers(0, 19))
        start = data.draw(st.integers(0, order.epoch_length))
        stop = data.draw(st.integers(start, order.epoch_length + 3))
        assert order.rows(epoch, start, stop) == wanted[epoch][start:stop]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["shuffled", "shuffled by a generator", "weighted", "a generator shared"])
def test_loader_workers_and_persistent_ones_draw_as_in_torch(kind: str, persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        loader = cases.MAP_LOADERS[kind](20)
        vars(loader).update(num_workers=2, prefetch_factor=2, persistent_workers=persistent)
        return loader

    order = RecipeOrder(make(), seed=5)
    assert [order.rows(epoch, 0, 99) for epoch in range(3)] == as_torch_orders(make(), seed=5, epochs=3)


def test_a_recipe_draws_from_no_global_generator_and_leaves_the_users_generators() -> None:
    loader = cases.MAP_LOADERS["a generator shared"](50)
    before = (torch.get_rng_state(), loader.generator.get_state(), random.getstate())
    RecipeOrder(loader, seed=1).rows(3, 0, 10)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(loader.generator.get_state(), before[1])
    assert random.getstate() == before[2]


def test_one_large_draw_with_replacement_is_torchs_many_draws_of_32() -> None:
    size = (1 << 20) + 77
    loader = DataLoader(cases.Squares(1000), batch_size=64, sampler=RandomSampler(range(1000), True, size))
    order = RecipeOrder(loader, seed=9)
    rows = order.rows(0, 0, order.epoch_length)
    torch.manual_seed(9)
    torch.empty((), dtype=torch.int64).random_()
    wanted = list(loader.sampler)
    assert [index for row in rows for index in row] == wanted
    late = order.rows(0, order.epoch_length - 1, order.epoch_length)[0]
    assert order.rows(0, 0, 1)[0] == wanted[:64]
    assert late == wanted[-len(late) :]


def test_the_order_of_20_million_batches_costs_nothing_until_it_is_asked_for() -> None:
    loader = DataLoader(range(20_480_000 * 64), batch_size=64)
    began = time.process_time()
    order = RecipeOrder(loader, seed=0)
    assert order.epoch_length == 20_480_000
    assert order.rows(0, 20_479_999, 20_480_000)[0][-1] == 20_480_000 * 64 - 1
    assert time.process_time() - began < 0.5


# --- samplers of the user's -----------------------------------------------------------------------------------------


def written(store: MemoryStore, loader: DataLoader[Any], *, seed: int, units: int) -> tuple[list[int], ChunkOrder]:
    found = write_order(loader, name="data", seed=seed, units=units, store=store, keys=RunKeys("r"))
    return found.lengths, ChunkOrder(store, RunKeys("r"), name="data", chunk_elements=found.chunk_elements)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["a sampler of the user's", "a sampler of the user's, no batches"])
def test_a_sampler_of_the_users_is_written_as_torch_runs_it(kind: str, num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        loader = cases.MAP_LOADERS[kind](20)
        vars(loader).update(num_workers=num_workers, prefetch_factor=2)
        return loader

    wanted = as_torch_orders(make(), seed=4, epochs=3)
    units = sum(len(rows) for rows in wanted)
    lengths, order = written(MemoryStore(), make(), seed=4, units=units)
    assert lengths == [len(rows) for rows in wanted]
    assert [order.rows(epoch, 0, 999) for epoch in range(3)] == wanted


def test_an_infinite_sampler_is_cut_at_the_units() -> None:
    loader = cases.MAP_LOADERS["an infinite sampler"](9)
    lengths, order = written(MemoryStore(), loader, seed=2, units=33)
    assert lengths == [33]
    assert order.rows(0, 0, 99) == as_torch_orders(loader, seed=2, epochs=1, limit=33)[0]


def test_a_long_order_is_written_in_chunks_and_read_across_them() -> None:
    store = MemoryStore()
    batches = [[index] * 20_000 for index in range(130)]
    loader = DataLoader(cases.Squares(130), batch_sampler=Iterating(batches))
    lengths, order = written(store, loader, seed=0, units=130)
    assert lengths == [130]
    assert len(list(store.list("runs/r/order/data/"))) == 3
    assert [row[0] for row in order.rows(0, 50, 110)] == list(range(50, 110))
    assert order.rows(0, 129, 140) == [batches[129]]
    assert order.rows(0, 130, 140) == []


class Iterating:
    """A sampler that iterates what it is given."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


@pytest.mark.parametrize(
    "rows",
    [
        ["a", "b"],
        [(1, "x"), (2, None)],
        [[1.5], [True, "k"]],
        [torch.tensor(3), torch.tensor(4, dtype=torch.int16)],
        [torch.tensor([3, 4]), [5]],
        [1, [2], 3],
        [np.int64(7), np.uint8(2)],
        [[np.int64(7), np.int64(8)], [np.int32(1)], []],
        [np.arange(4, dtype=np.int16), np.array(["a", "bc"])],
        [[[1, 2], (np.float32(0.5), torch.tensor([True]))]],
    ],
)
def test_the_dataset_is_given_keys_of_the_types_that_the_sampler_yields(rows: list[Any]) -> None:
    loader = DataLoader(cases.Squares(5), batch_size=None, sampler=Iterating(rows))
    _, order = written(MemoryStore(), loader, seed=0, units=len(rows))
    found = order.rows(0, 0, 99)
    assert len(found) == len(rows)
    assert all(same_key(mine, theirs) for mine, theirs in zip(found, rows, strict=True)), found


def same_key(mine: Any, theirs: Any) -> bool:
    if type(mine) is not type(theirs):
        return False
    if isinstance(theirs, (list, tuple)):
        return len(mine) == len(theirs) and all(map(same_key, mine, theirs))
    if isinstance(theirs, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(theirs, (np.ndarray, np.generic)):
        return mine.dtype == theirs.dtype and bool(np.array_equal(mine, theirs))
    return bool(mine == theirs)


class InPlace:
    """A batch_sampler that yields views of one array, and one list again and again."""

    def __init__(self, *, views: bool) -> None:
        self.views = views
        self.array, self.row = np.arange(12), [0, 0]

    def __iter__(self) -> Any:
        for at in range(0, 12, 2):
            self.row[:] = at, at + 1
            yield self.array[at : at + 2] if self.views else self.row
        np.random.default_rng(0).shuffle(self.array)


@pytest.mark.parametrize("views", [True, False])
def test_a_row_that_the_sampler_changes_later_is_kept_as_it_was(views: bool) -> None:
    loader = DataLoader(cases.Squares(20), batch_sampler=InPlace(views=views))
    local = InPlace(views=views)
    expected = [[list(row) for row in local] for _ in range(2)]
    _, order = written(MemoryStore(), loader, seed=0, units=12)
    assert [[list(row) for row in order.rows(epoch, 0, 6)] for epoch in range(2)] == expected


def test_a_row_that_the_dataset_changes_is_whole_when_it_is_read_again() -> None:
    loader = DataLoader(cases.Squares(20), batch_size=None, sampler=Iterating([[1, 2], [3, 4]]))
    _, order = written(MemoryStore(), loader, seed=0, units=2)
    order.rows(0, 0, 2)[0].clear()
    assert order.rows(0, 0, 2) == [[1, 2], [3, 4]]


def test_keys_of_other_types_are_refused() -> None:
    loader = DataLoader(cases.Squares(5), batch_size=None, sampler=Iterating([object()]))
    with pytest.raises(Exception, match="keys of type object; allowed: numbers, strings"):
        written(MemoryStore(), loader, seed=0, units=1)


def test_a_sampler_that_yields_nothing_in_a_later_epoch_is_an_error() -> None:
    once = iter(range(4))
    loader = DataLoader(cases.Squares(5), batch_size=None, sampler=Iterating(once))
    with pytest.raises(Exception, match="yields nothing in epoch 1, 6 of 10 units are missing"):
        written(MemoryStore(), loader, seed=0, units=10)


class Broken(cases.OddFirst):
    def __iter__(self) -> Any:
        yield 1
        raise KeyError("my own fault")


def test_a_sampler_that_raises_is_named_with_its_traceback() -> None:
    loader = DataLoader(cases.Squares(5), sampler=Broken(5))
    with pytest.raises(Exception, match="its sampler raised in epoch 0: KeyError: 'my own fault'") as caught:
        written(MemoryStore(), loader, seed=0, units=10)
    assert 'raise KeyError("my own fault")' in caught.value.fields["traceback"]


def test_a_late_epoch_of_a_shuffle_costs_one_permutation_and_not_those_of_all_before_it() -> None:
    order = RecipeOrder(DataLoader(Indices(2_000_000), batch_size=1, shuffle=True), seed=1)
    began = time.process_time()
    first = order.rows(0, 0, 1)
    one_s = time.process_time() - began
    began = time.process_time()
    assert order.rows(100, 0, 1) != first
    assert time.process_time() - began < 20 * max(one_s, 0.02)


# --- base seeds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "kind", ["shuffled", "shuffled by a generator", "weighted", "a generator shared", "a sampler of the user's"]
)
def test_loader_workers_get_the_base_seeds_that_torch_draws(kind: str, persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        loader = cases.MAP_LOADERS[kind](6)
        vars(loader).update(num_workers=1, prefetch_factor=2, persistent_workers=persistent)
        return loader

    torch.manual_seed(5)
    loader, wanted, units = make(), [], 0
    for _ in range(3):
        one = iter(loader)
        wanted.append(one._base_seed)
        units += len(list(one))
    assert len(set(wanted)) == (1 if persistent else 3)
    if kind in RECIPES:
        order = RecipeOrder(make(), seed=5)
        assert [order.base_seed(epoch) for epoch in (2, 0, 1)] == [wanted[2], wanted[0], wanted[1]]
    else:
        found = write_order(make(), name="data", seed=5, units=units, store=MemoryStore(), keys=RunKeys("r"))
        assert found.base_seeds == wanted[: 1 if persistent else 3]


class SystemsOrder(cases.OddFirst):
    """Draws from what no seed reaches."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(self.size), self.size))


def _in_small_batches(sampler: Any) -> DataLoader[Any]:
    return DataLoader(cases.Squares(40), batch_size=2, sampler=sampler)


def lose_a_chunk(make: Callable[[], DataLoader[Any]]) -> tuple[MemoryStore, ChunkOrder, str]:
    """Write the order of three epochs, lose that of the second one; return it as it is read again."""
    store, keys = MemoryStore(), RunKeys("r")
    more: dict[str, Any] = {"name": "data", "seed": 3, "units": 60, "keys": keys}
    found = write_order(make(), store=store, **more)
    lost = keys.order_chunk("data", 1, 0)
    order = ChunkOrder(
        store,
        keys,
        name="data",
        chunk_elements=found.chunk_elements,
        write_again=lambda: write_lost_chunks(make(), store=store, **more),
    )
    return store, order, lost


def test_a_chunk_that_is_lost_is_written_again_as_it_was() -> None:
    store, order, lost = lose_a_chunk(lambda: _in_small_batches(cases.OddFirst(40)))
    before = {info.key: store.get(info.key) for info in store.list("")}
    store.delete(lost)
    torch.rand(5)  # this process has drawn since
    assert len(order.rows(1, 0, 20)) == 20
    assert {info.key: store.get(info.key) for info in store.list("")} == before


def test_an_order_that_cannot_be_drawn_again_is_an_error_and_nothing_is_written() -> None:
    store, order, lost = lose_a_chunk(lambda: _in_small_batches(SystemsOrder(40)))
    store.delete(lost)
    with pytest.raises(
        LoaderError, match=r"'data': a part of the order .* is gone, and run again it gives another one"
    ):
        order.rows(1, 0, 20)
    assert store.head(lost) is None
