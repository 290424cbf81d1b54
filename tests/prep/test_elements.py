from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from taas.errors import LoaderError
from taas_tasks.prep.elements import Failure, Packed, Task, element_seeded, loader_of_tasks, owned, packed
from taas_tasks.prep.seeding import seed_start
from tests.prep import cases, oracle

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Boxed:
    value: torch.Tensor


class Fussy(cases.Squares):
    """Raises at one index an exception that cannot be made from a message."""

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise UnicodeDecodeError("utf-8", b"x", 0, 1, "my own fault")
        return super().__getitem__(index)


def tasks(loader: DataLoader[Any], count: int) -> list[Task]:
    rows = loader.batch_sampler or loader.sampler
    return [Task(0, index, row) for index, row in zip(range(count), rows, strict=False)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["default", "batches", "no batches but lists of indices", "a collate_fn"])
def test_elements_are_what_the_loader_makes_of_its_rows(kind: str, num_workers: int) -> None:
    make = cases.MAP_LOADERS[kind]
    found = list(loader_of_tasks(make(10), tasks(make(10), 99), seed=0, num_workers=num_workers))
    assert oracle.equal(found, list(make(10)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_comes_back_as_what_failed_and_the_others_come_too(num_workers: int) -> None:
    loader = DataLoader(Fussy(6), batch_size=2)
    good, failure, last = loader_of_tasks(loader, tasks(loader, 3), seed=0, num_workers=num_workers)
    assert isinstance(failure, Failure)
    assert (failure.epoch, failure.index, failure.row) == (0, 1, "[2, 3]")
    assert failure.error.startswith("UnicodeDecodeError: 'utf-8' codec can't decode byte 0x78")
    assert "test_elements.py" in failure.traceback
    assert "taas_tasks/prep" not in failure.traceback
    assert oracle.equal([good, last], [next(iter(loader)), last])
    assert not isinstance(last, Failure)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_values_do_not_depend_on_workers_or_on_what_came_before(num_workers: int) -> None:
    loader = DataLoader(cases.Noisy(9), batch_size=2)
    every = tasks(loader, 5)
    wanted = [next(iter(loader_of_tasks(loader, [task], seed=3))) for task in every]
    found = list(loader_of_tasks(loader, every[::-1], seed=3, num_workers=num_workers))
    assert oracle.equal(found[::-1], wanted)


def test_the_users_dataset_is_seen_in_a_loader_worker() -> None:
    loader = DataLoader(cases.SeesItself(8), num_workers=2, worker_init_fn=_mark)
    found = list(loader_of_tasks(loader, tasks(loader, 8), seed=0))
    assert all(int(element[0, 1]) == 1 for element in found)
    assert [int(element[0, 0]) for element in found] == [100, 1, 2, 3, 4, 5, 6, 7]


def _mark(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == worker_id
    info.dataset.__class__ = Marked


class Marked(cases.SeesItself):
    def __getitem__(self, index: int) -> Any:
        seen = super().__getitem__(index)
        return seen if index else seen + torch.tensor([100, 0])


def test_the_wrapper_is_deterministic_in_the_epoch_and_keeps_torchs_order() -> None:
    def passes(num_workers: int) -> list[Any]:
        loader = DataLoader(cases.Noisy(9), batch_size=2, shuffle=True, num_workers=num_workers)
        seeded = element_seeded(loader, seed=4)
        seed_start(4)
        return [list(seeded), list(seeded)]

    first, second = passes(0)
    assert oracle.equal(passes(2), [first, second])
    order = oracle.local_stream(DataLoader(cases.Squares(9), batch_size=2, shuffle=True), seed=4, units=10)
    assert [e[:, 0].tolist() for e in first + second] == [item.element["x"][:, 0].tolist() for item in order]
    assert not oracle.equal(sorted(e[0, 1].item() for e in first), sorted(e[0, 1].item() for e in second))


def test_the_wrapper_raises_what_the_dataset_raised() -> None:
    with pytest.raises(LoaderError, match="UnicodeDecodeError") as caught:
        list(element_seeded(DataLoader(Fussy(6)), seed=0))
    assert caught.value.fields == {"epoch": 0, "index": 3}


def test_tensors_in_shared_memory_get_memory_of_their_own_in_every_container() -> None:
    def shared() -> torch.Tensor:
        return torch.arange(3).share_memory_()

    plain = torch.arange(3)
    element = {
        "a": [shared(), 1],
        "b": Pair(shared(), "x"),
        "c": Boxed(shared()),
        "d": (plain,),
        "e": UserDict(f=shared()),
    }
    wanted = {"a": [plain, 1], "b": Pair(plain, "x"), "c": Boxed(plain), "d": (plain,), "e": UserDict(f=plain)}
    found = owned(element, always=False)
    assert found["d"][0] is plain
    assert not found["c"].value.is_shared()
    assert not any(tensor.is_shared() for tensor in (found["a"][0], found["b"].left, found["e"]["f"]))
    assert type(found["b"]) is Pair
    assert oracle.equal({k: v for k, v in found.items() if k != "e"}, {k: v for k, v in wanted.items() if k != "e"})


def test_a_buffer_that_the_dataset_uses_again_is_copied() -> None:
    buffer = {"x": torch.zeros(2), "y": [np.zeros(2)]}
    kept = owned(buffer, always=True)
    buffer["x"] += 1
    buffer["y"][0] += 1
    buffer["y"].append(2)
    assert oracle.equal(kept, {"x": torch.zeros(2), "y": [np.zeros(2)]})


class Kept(cases.Squares):
    """Keeps what it gives: one dict of all kinds of leaves, for every index."""

    def __init__(self) -> None:
        super().__init__(8)
        self.element = {
            "small": torch.arange(6).reshape(2, 3).t(),
            "empty": torch.empty(0, 3),
            "number": torch.tensor(2.5, dtype=torch.float16),
            "bools": [torch.tensor([True, False]), (torch.tensor([1, 2], dtype=torch.uint8), "text")],
            "view": torch.zeros(1 << 20)[:4],
            "large": torch.zeros(1 << 15),
            "brain": torch.ones(3, dtype=torch.bfloat16),
            "grad": torch.ones(3, requires_grad=True),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "pair": Pair(torch.ones(1), 2),
            "array": np.arange(3),
        }

    def __getitem__(self, index: int) -> Any:
        return self.element


def test_small_plain_tensors_come_packed_and_are_the_same_again() -> None:
    dataset = Kept()
    loader = DataLoader(dataset, batch_size=None, num_workers=1, collate_fn=lambda one: one)
    (found,) = loader_of_tasks(loader, tasks(loader, 1), seed=0, packs=True)
    by_pipe = {name for name, leaf in found.items() if isinstance(leaf, Packed)}
    assert by_pipe == {"small", "empty", "number", "view"}
    assert isinstance(found["bools"][0], Packed) and isinstance(found["bools"][1][0], Packed)
    back = owned(found, always=False)
    assert {name: oracle.equal(leaf, dataset.element[name]) for name, leaf in back.items()} == dict.fromkeys(back, True)
    back["small"][0, 0] = 7  # writable, and its own
    assert not back["small"].is_shared()


def test_packing_changes_nothing_of_the_users() -> None:
    element = Kept().element
    before = dict(element)
    packed(element)
    assert all(element[name] is leaf for name, leaf in before.items())
    assert isinstance(element["bools"][0], torch.Tensor)
