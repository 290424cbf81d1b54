"""Loaders whose workers are their streams, and how machines share them: in turns, in this process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from taas.errors import ObjectMissing, StoreUnavailable
from taas_tasks.prep.work import Pace
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import Plan
from tests.prep import cases

QUICK = Pace(refresh_s=1.0, poll_s=0.01)
_PATIENCE = 30  # records asked for in vain, one after the other, before a machine's turn ends
_TURNS = 60


def drawn() -> float:
    """A number from all three generators."""
    return random.random() + float(np.random.rand()) + float(torch.rand(()))


class Uneven(IterableDataset[Any]):
    """Each worker yields another number of elements in each epoch, some none; draws random numbers."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for at in range((5 + 7 * info.id + 3 * self.epoch) % 11):
            yield {"at": torch.tensor([self.epoch, info.id, at]), "drawn": drawn(), "name": "x" * at}


class Everything(IterableDataset[Any]):
    """Asks for no worker info: every worker yields everything."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([float(at), drawn()]) for at in range(self.size))


class Split(IterableDataset[Any]):
    """Its part is set by a worker_init_fn; its iterator draws when it is made, and it has a generator of its own."""

    def __init__(self, size: int) -> None:
        self.numbers = range(size)
        self.own = np.random.default_rng(5)

    def __iter__(self) -> Iterator[Any]:
        first = random.random()
        return (torch.tensor([float(at), first, self.own.random()]) for at in self.numbers)


def take_part(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    assert isinstance(dataset, Split), "the user's own dataset is shown"
    dataset.numbers = dataset.numbers[worker_id :: info.num_workers]
    np.random.seed(worker_id)


class Stays(IterableDataset[Any]):
    """Remembers in its worker how often it was iterated."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        self.passes += 1
        for at in range(4 + info.id):
            yield torch.tensor([self.passes, info.id, at]), drawn()
        random.random()  # behind the last element: a worker that stays has drawn it when the next epoch begins


class Resumable(IterableDataset[Any]):
    """Has a state_dict from which it goes on; its order is shuffled in a buffer. ``read`` elements are counted."""

    def __init__(self, size: int, *, is_true: bool = True) -> None:
        self.size = size
        self.is_true = is_true
        self.at = 0
        self.buffer: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at if self.is_true else 0, "buffer": list(self.buffer), "bytes": b"x", "t": torch.ones(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], list(state["buffer"])

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while self.at < self.size or self.buffer:
            while self.at < self.size and len(self.buffer) < 4:
                self.buffer.append(first + step * self.at)
                self.at += 1
            number = self.buffer.pop(random.randrange(len(self.buffer)))
            yield torch.tensor([float(number), drawn()])


class ResumableIterator(IterableDataset[Any]):
    """Its iterator has the state."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return _Counting(self.size, info.id)


class _Counting:
    def __init__(self, size: int, first: int) -> None:
        self.size, self.first, self.at = size, first, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == self.size:
            raise StopIteration
        self.at += 1
        return [100 * self.first + self.at, drawn()]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


Make = Callable[[], DataLoader[Any]]

ITERABLES: dict[str, Make] = {
    "aware": lambda: DataLoader(cases.Numbers(31, draws=True), batch_size=None, num_workers=3),
    "aware in batches": lambda: DataLoader(cases.Numbers(50, draws=True), batch_size=3, num_workers=2),
    "the last batch dropped": lambda: DataLoader(
        cases.Numbers(50, draws=True), batch_size=4, drop_last=True, num_workers=3
    ),
    "unaware": lambda: DataLoader(Everything(9), batch_size=2, num_workers=2),
    "infinite": lambda: DataLoader(cases.Numbers(None, draws=True), batch_size=2, num_workers=3),
    "uneven": lambda: DataLoader(Uneven(), batch_size=None, num_workers=4),
    "uneven batches": lambda: DataLoader(Uneven(), batch_size=2, num_workers=4, collate_fn=lambda rows: rows),
    "split by worker_init_fn": lambda: DataLoader(Split(23), batch_size=None, num_workers=3, worker_init_fn=take_part),
    "workers that stay": lambda: DataLoader(Stays(), batch_size=None, num_workers=3, persistent_workers=True),
    "a generator given": lambda: DataLoader(
        cases.Numbers(20, draws=True), batch_size=None, num_workers=2, generator=cases.generator(4), prefetch_factor=5
    ),
    "one worker": lambda: DataLoader(cases.Numbers(20, draws=True), batch_size=3, num_workers=1),
    "more workers than elements": lambda: DataLoader(cases.Numbers(2, draws=True), batch_size=None, num_workers=4),
    "a state": lambda: DataLoader(Resumable(13), batch_size=3, num_workers=3),
    "a state of the iterator": lambda: DataLoader(ResumableIterator(9), batch_size=None, num_workers=2),
}


class NoisyDrawing(cases.Noisy):
    """Remembers in its worker how many elements it has given."""

    given = 0

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        return torch.cat([super().__getitem__(index), torch.tensor([float(self.given)])])


def _exact(n: int, **more: Any) -> DataLoader[Any]:
    return DataLoader(NoisyDrawing(n), **{"num_workers": 3} | more)


def _seeded(worker_id: int) -> None:
    random.seed(worker_id)


EXACT: dict[str, Make] = {
    "plain": lambda: _exact(17, batch_size=2),
    "shuffled": lambda: _exact(20, shuffle=True),
    "shuffled by a generator": lambda: _exact(20, batch_size=3, shuffle=True, generator=cases.generator(1)),
    "weighted": lambda: _exact(
        20, batch_size=2, sampler=torch.utils.data.WeightedRandomSampler([i + 0.5 for i in range(20)], 26)
    ),
    "a sampler of the user's": lambda: _exact(16, batch_size=2, sampler=cases.OddFirst(16)),
    "a batch sampler": lambda: _exact(16, batch_sampler=cases.Shrinking(16), num_workers=2),
    "an infinite sampler": lambda: _exact(16, batch_size=2, sampler=cases.Endless(16)),
    "no batches": lambda: _exact(16, batch_size=None, shuffle=True, drop_last=False),
    "worker_init_fn": lambda: _exact(16, batch_size=2, shuffle=True, worker_init_fn=_seeded),
    "workers that stay": lambda: _exact(13, batch_size=2, shuffle=True, persistent_workers=True),
    "workers that stay, a sampler of the user's": lambda: _exact(
        13, batch_size=2, sampler=cases.OddFirst(13), persistent_workers=True
    ),
    "set_epoch": lambda: DataLoader(cases.ByEpoch(9), batch_size=2, num_workers=2),
    "fewer elements than workers": lambda: _exact(3, batch_size=2, shuffle=True, num_workers=4),
    "items at once": lambda: DataLoader(cases.Whole(12), batch_size=3, num_workers=2, drop_last=True),
}


class Turn(MemoryStore):
    """A machine's view of the store. When nothing new comes in the ledger for long, the machine's turn ends."""

    def __init__(self, shared: MemoryStore) -> None:
        super().__init__()
        self._objects = shared._objects
        self._lock = shared._lock
        self._missed = 0

    def get(self, key: str) -> bytes:
        try:
            found = super().get(key)
        except ObjectMissing:
            self._missed += 1
            if self._missed > _PATIENCE:
                raise StoreUnavailable("this machine's turn is over", key=key) from None
            raise
        self._missed = 0
        return found


def prepare_in_turns(store: MemoryStore, make: Make, plan: Plan) -> int:
    """Let the machines of a plan prepare one after the other, each until it waits for others; return the tries.

    A turn's end is an error in that try: the next one is a retry of the machine.
    """
    machines = cases.loader_plan_of(plan).machines
    done: set[int] = set()
    for turn in itertools.count(1):
        for machine in reversed(range(machines)):
            try:
                cases.prepare(Turn(store), make, plan, machine=machine, generation=turn, pace=QUICK)
                done.add(machine)
            except StoreUnavailable as error:
                assert "turn is over" in error.message
        if len(done) == machines:
            return turn
        assert turn < _TURNS, "the machines wait for each other"
    raise AssertionError
