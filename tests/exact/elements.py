"""Datasets, samplers and functions of many kinds. All can be imported, so that any process opens them by name."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

# --- values ----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    number: Any
    label: str


@dataclasses.dataclass
class Item:
    number: int
    values: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str
    pair: Pair


def as_number(index: int) -> Any:
    return index


def as_zero_dim(index: int) -> Any:
    return torch.tensor(index * 0.5)


def as_empty(index: int) -> Any:
    return {"index": index, "nothing": torch.empty(0, 3), "none": np.empty(0, np.int32), "list": [], "text": ""}


def as_bf16(index: int) -> Any:
    return torch.full((3,), index / 3, dtype=torch.bfloat16), torch.tensor(index, dtype=torch.float16)


def as_ragged(index: int) -> Any:
    return torch.arange(index % 5 * 3).reshape(-1, 3) + index, np.full(index % 3, index, np.uint8)


def as_sparse(index: int) -> Any:
    dense = torch.zeros(4, 5)
    dense[index % 4, : index % 3] = index
    twice = torch.sparse_coo_tensor([[1, 1, index % 3]], [1.0, 2.0, float(index)], (3,), check_invariants=True)
    return {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "uncoalesced": twice, "index": index}


def as_pair(index: int) -> Any:
    return Pair(torch.tensor([index]), f"é{index}")


def as_item(index: int) -> Any:
    return Item(index, [torch.ones(2) * index, Frozen(str(index), Pair(index, "x"))])


def as_dict(index: int) -> Any:
    return {"x": torch.tensor([index, -index]), 3: index / 2, None: {"deep": (index, [True, None])}}


def as_row(index: int) -> Any:
    """What torch collates: a tensor, a number, text, and a dict in a dict."""
    return {"x": torch.tensor([index, index * index]), "y": index / 2, "name": f"n{index}", "in": {"one": index}}


def as_list(index: int) -> Any:
    return [index, "a" * (index % 4), [torch.tensor(index)]]


def as_text(index: int) -> Any:
    return f"élément {index}"


def as_bytes(index: int) -> Any:
    return bytes([index % 256]) * (index % 7)


def drawn(index: int) -> Any:
    """Draw from all three global generators, some more than once."""
    numbers = [random.random(), float(np.random.rand()), float(torch.rand(())), float(np.random.normal())]
    return torch.tensor([index, *numbers, random.gauss(0, 1)], dtype=torch.float64)


# --- map-style -------------------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """``value(index)`` for every index; ``size`` of them."""

    def __init__(self, size: int, value: Any = as_row) -> None:
        self.size = size
        self.value = value

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.value(index)


class Batches(Rows):
    """Fetches a whole batch at once, and says so in the values."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [torch.tensor([index, len(indices)]) for index in indices]


class ByKeys(Rows):
    """Indexed by text."""

    def __getitem__(self, key: Any) -> Any:
        return {"key": key, "length": len(key)}


class BySets(Rows):
    """Indexed by whole batches, with ``batch_size=None``."""

    def __getitem__(self, indices: Any) -> Any:
        return torch.tensor(indices) * 3


class ByEpoch(Rows):
    """Its values depend on the epoch it was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.epoch, index])


class Scaled(Rows):
    """What ``scale`` (a ``worker_init_fn``) set in each loader worker shows in its values."""

    factor = 1.0

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index * self.factor])


def scale(worker_id: int) -> None:
    """A ``worker_init_fn``: changes the worker's dataset and seeds numpy by the worker's id."""
    info = get_worker_info()
    info.dataset.factor = 10.0
    np.random.seed(100 + worker_id)


def seed_worker(worker_id: int) -> None:
    """A ``worker_init_fn``: makes the worker's draws its own."""
    random.seed(worker_id)
    torch.manual_seed(1000 + worker_id)


class Draws(Rows):
    """Random augmentations, the classical case of equal numbers in all loader workers (numpy)."""

    def __init__(self, size: int) -> None:
        super().__init__(size, drawn)


class TellsWorker(Rows):
    """Shows the worker that loads it: only loader workers that are the local ones give the local values."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return torch.tensor([index, -1, 0] if info is None else [index, info.id, info.num_workers])


# --- iterable --------------------------------------------------------------------------------------------------------


class Shared(IterableDataset[Any]):
    """Shares its numbers among the loader workers; ``size`` None never ends. ``draws``: random values."""

    def __init__(self, size: int | None, *, draws: bool = False) -> None:
        self.size = size
        self.draws = draws

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        at, step = (0, 1) if info is None else (info.id, info.num_workers)
        while self.size is None or at < self.size:
            yield drawn(at) if self.draws else torch.tensor([float(at), -float(step)])
            at += step


class Blocks(Shared):
    """Gives each loader worker one contiguous block, the last one the rest: blocks of different lengths."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, count = (0, 1) if info is None else (info.id, info.num_workers)
        share = (self.size or 0) // (count + 1)
        start = worker * share
        stop = (self.size or 0) if worker == count - 1 else start + share
        for at in range(start, stop):
            yield {"at": at, "drawn": random.random() if self.draws else 0.0}


class EndsEarly(IterableDataset[Any]):
    """Worker w ends after ``lengths[w]`` elements, some at once."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, mine = (0, sum(self.lengths)) if info is None else (info.id, self.lengths[info.id])
        yield from (torch.tensor([worker, at]) for at in range(mine))


class Unaware(IterableDataset[Any]):
    """Ignores ``get_worker_info``: every loader worker yields all of it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.size))


class Growing(IterableDataset[Any]):
    """Its epochs grow, and it is told which one it is."""

    epoch = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        at, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from ((self.epoch, number) for number in range(at, self.size + 9 * self.epoch, step))


class Stateful(IterableDataset[Any]):
    """Can say where it stands, and go on from there."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.at: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        at = first if self.at is None else self.at
        while at < self.size:
            self.at = at + step
            yield torch.tensor([at, at * at])
            at += step
        self.at = None


# --- samplers --------------------------------------------------------------------------------------------------------


class OddFirst(Sampler[int]):
    """Draws from torch's global generator, and has an own idea of its length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size).tolist()
        return iter([at for at in order if at % 2] + [at for at in order if at % 2 == 0])

    def __len__(self) -> int:
        return self.size + 3


class ByPython(Sampler[int]):
    """Draws from python's and numpy's generators, lazily."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield (random.randrange(self.size) + int(np.random.randint(self.size))) % self.size


class Names(Sampler[str]):
    """Yields text."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[str]:
        return iter([f"key {at}" for at in torch.randperm(self.size).tolist()])

    def __len__(self) -> int:
        return self.size


class Buckets(Sampler[list[int]]):
    """Batches of different sizes, shuffled, told the epoch."""

    epoch = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng(self.epoch).permutation(self.size)
        while len(order):
            count = 1 + int(order[0]) % 3
            yield [int(at) for at in order[:count]]
            order = order[count:]


class Shrinking(Sampler[list[int]]):
    """A batch sampler whose epochs differ in length."""

    epoch = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for at in range(max(1, self.size - 7 * self.epoch)):
            yield [at % self.size, (at * 3) % self.size]


class Endless(Sampler[int]):
    """Never ends."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(self.size, ()).item())


def padded(rows: list[Any]) -> Any:
    """A ``collate_fn`` that pads to the batch's longest, and draws: it is seeded with its element."""
    tensors = [row[0].reshape(-1) for row in rows]
    jitter = random.random() + float(torch.rand(()))
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), torch.tensor([jitter])


def as_lists(rows: list[Any]) -> Any:
    return rows


def generator(seed: int) -> torch.Generator:
    """A generator that has been used before."""
    made = torch.Generator()
    made.manual_seed(seed)
    torch.rand(7, generator=made)
    return made
