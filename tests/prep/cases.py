"""Datasets, samplers and loaders of many kinds, and how to prepare them in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from taas.flavors import FLAVORS
from taas.request import LoaderRef, TrainRequest
from taas_tasks.layout import RunKeys, run_key
from taas_tasks.plan import make_plan
from taas_tasks.prep.commit import Producer
from taas_tasks.prep.inspect_loader import find_order, versions
from taas_tasks.prep.lost_records import MakeAgain
from taas_tasks.prep.prepare_program import order_of
from taas_tasks.prep.produce import Tally, produce
from taas_tasks.prep.produce_streams import produce_streams
from taas_tasks.prep.sequential import produce_in_sequence
from taas_tasks.prep.stream_starts import starts_of
from taas_tasks.prep.work import Pace
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import Inspection, LoaderPlan, PinnedRequest, Plan

RUN_ID = "manual__a"
RUN = run_key(RUN_ID)
FAST = Pace(refresh_s=0.0, patience_s=0.05, poll_s=0.01)


class Squares(Dataset[Any]):
    """Deterministic: a dict of a tensor, a number and a string."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"x": torch.tensor([index, index * index]), "y": float(index), "name": f"n{index}"}


class Whole(Squares):
    """Fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [super(Whole, self).__getitem__(index) for index in indices]


class Noisy(Squares):
    """Draws from all three global generators, several times."""

    def __getitem__(self, index: int) -> Any:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([index, *drawn, random.random()], dtype=torch.float64)


class ByEpoch(Squares):
    """Has a set_epoch that changes its values."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.epoch, index])


class SeesItself(Squares):
    """Tells what get_worker_info().dataset is."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return torch.tensor([index, int(info is None or info.dataset is self)])


class Numbers(IterableDataset[Any]):
    """An iterable that shares its numbers among its loader workers and draws from the global generators."""

    def __init__(self, size: int | None, *, draws: bool = False) -> None:
        self.size = size
        self.draws = draws

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        at = first
        while self.size is None or at < self.size:
            yield torch.tensor([float(at), random.random() + float(torch.rand(())) if self.draws else 0.0])
            at += step


class OddFirst(Sampler[int]):
    """A sampler of the user's that draws from the global generator, and has an own idea of its length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size).tolist()
        return iter([i for i in order if i % 2] + [i for i in order if i % 2 == 0])

    def __len__(self) -> int:
        return self.size + 3


class Shrinking(Sampler[list[int]]):
    """A batch sampler whose epochs differ in length."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

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


def generator(seed: int) -> torch.Generator:
    made = torch.Generator()
    made.manual_seed(seed)
    torch.rand(7, generator=made)
    return made


def _shared(n: int) -> DataLoader[Any]:
    one = generator(3)
    return DataLoader(Squares(n), batch_size=2, sampler=RandomSampler(range(n), generator=one), generator=one)


MAP_LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "default": lambda n: DataLoader(Squares(n)),
    "batches": lambda n: DataLoader(Whole(n), batch_size=3),
    "batches that drop the last": lambda n: DataLoader(Squares(n + 3), batch_size=4, drop_last=True),
    "shuffled": lambda n: DataLoader(Squares(n), batch_size=2, shuffle=True),
    "shuffled by a generator": lambda n: DataLoader(Squares(n), batch_size=2, shuffle=True, generator=generator(1)),
    "a generator shared": _shared,
    "a generator of the loader alone": lambda n: DataLoader(Squares(n), generator=generator(2)),
    "drawn with replacement": lambda n: DataLoader(
        Squares(n), sampler=RandomSampler(range(n), replacement=True, num_samples=2 * n + 5)
    ),
    "drawn with replacement by a generator": lambda n: DataLoader(
        Squares(n), batch_size=3, sampler=RandomSampler(range(n), replacement=True, generator=generator(8))
    ),
    "more samples than there are": lambda n: DataLoader(
        Squares(n), sampler=RandomSampler(range(n), num_samples=3 * n + 1, generator=generator(5))
    ),
    "weighted": lambda n: DataLoader(
        Squares(n), batch_size=2, sampler=WeightedRandomSampler([i + 0.5 for i in range(n)], n + 4)
    ),
    "weighted without replacement": lambda n: DataLoader(
        Squares(n), sampler=WeightedRandomSampler([1.0] * n, n, replacement=False, generator=generator(6))
    ),
    "a subset": lambda n: DataLoader(Squares(2 * n), batch_size=3, sampler=SubsetRandomSampler(range(0, 2 * n, 2))),
    "a batch sampler": lambda n: DataLoader(
        Squares(n), batch_sampler=BatchSampler(RandomSampler(range(n)), 3, drop_last=False)
    ),
    "no batches": lambda n: DataLoader(Squares(n), batch_size=None, shuffle=True),
    "no batches but lists of indices": lambda n: DataLoader(
        Rows(n), batch_size=None, sampler=BatchSampler(SequentialSampler(range(n)), 3, drop_last=False)
    ),
    "a list as sampler": lambda n: DataLoader(Squares(n), batch_size=2, sampler=list(range(n))[::-1]),
    "a collate_fn": lambda n: DataLoader(Squares(n), batch_size=3, collate_fn=lambda rows: [r["x"] for r in rows]),
    "set_epoch": lambda n: DataLoader(ByEpoch(n), batch_size=2),
    "a sampler of the user's": lambda n: DataLoader(Squares(n), batch_size=2, sampler=OddFirst(n)),
    "a sampler of the user's, no batches": lambda n: DataLoader(Squares(n), batch_size=None, sampler=OddFirst(n)),
    "epochs that differ": lambda n: DataLoader(Squares(n), batch_sampler=Shrinking(n)),
    "an infinite sampler": lambda n: DataLoader(Squares(n), batch_size=2, sampler=Endless(n)),
}

ITERABLE_LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "iterable": lambda n: DataLoader(Numbers(n, draws=True), batch_size=2),
    "iterable without batches": lambda n: DataLoader(Numbers(n, draws=True), batch_size=None),
    "iterable that drops the last": lambda n: DataLoader(Numbers(n + 4), batch_size=3, drop_last=True),
    "infinite iterable": lambda n: DataLoader(Numbers(None, draws=True), batch_size=3),
}


class Rows(Squares):
    """Indexed by lists."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index) * 2


# --- preparing ------------------------------------------------------------------------------------------------------


def plan_of(
    store: ObjectStore,
    make: Callable[[], DataLoader[Any]],
    *,
    units: int,
    machines: int = 1,
    seed: int = 0,
    randomness: str = "element",
    sizes: dict[str, int] | None = None,
    has_position: bool = False,
) -> Plan:
    """Return the plan of a run with one loader named ``data``, and put it; ``sizes`` override the segments'."""
    request = TrainRequest(
        project="demo",
        script="train.py",
        cpus=machines,
        units=units,
        loaders={"data": LoaderRef(source="data.py:make")},
        seed=seed,
        randomness=randomness,
    )
    found = find_order(make, producer=producer(0), store=store, seed=seed, randomness=randomness, units=units)
    inspection = Inspection(
        loader="data",
        kind="map",
        order=found.kind,
        read_by=found.read_by,
        num_streams=found.num_streams,
        base_seeds=found.base_seeds,
        has_position=has_position,
        epoch_length=found.epoch_length,
        epoch_lengths=found.epoch_lengths,
        claimed_length=None,
        num_loader_workers=0,
        batch_size=None,
        element_bytes=1000,
        element_seconds=0.01,
        sampled_elements=1,
        order_chunk_elements=found.chunk_elements,
        order_num_epochs=found.num_epochs,
        versions=versions(),
    )
    pinned = PinnedRequest(run_id=RUN_ID, run=RUN, request=request, snapshot="0" * 64, base_record=0)
    plan = make_plan(pinned, {"data": inspection}, FLAVORS)
    if sizes is not None:
        loader = plan.loaders["data"]
        changed = loader.model_copy(update={"sizes": loader.sizes.model_copy(update=sizes)})
        plan = plan.model_copy(update={"loaders": {"data": changed}})
    store.put(RunKeys(RUN).plan, plan.to_bytes())
    return plan


def producer(machine: int, *, generation: int = 1) -> Producer:
    return Producer(RUN, "data", machine, f"c1-{machine}", generation)


def prepare(
    store: ObjectStore,
    make: Callable[[], DataLoader[Any]],
    plan: Plan,
    *,
    machine: int = 0,
    generation: int = 1,
    pace: Pace = FAST,
    allow_pickle: bool = False,
    make_again: MakeAgain | None = None,
) -> Tally:
    """Prepare one machine's share in this process, as the program does."""
    loader, loader_plan = make(), plan.loaders["data"]
    who = producer(machine, generation=generation)
    if loader_plan.inspection.read_by == "process":
        return produce_in_sequence(
            loader,
            loader_plan,
            producer=who,
            store=store,
            seed=plan.seed,
            allow_pickle=allow_pickle,
            is_exact=plan.randomness == "exact",
        )
    if loader_plan.is_merged:
        starts = starts_of(loader, loader_plan, store=store, run=RUN, seed=plan.seed)
        return produce_streams(
            loader,
            starts,
            loader_plan,
            producer=who,
            store=store,
            allow_pickle=allow_pickle,
            pace=pace,
            make_again=make_again,
        )
    order = order_of(loader, loader_plan, store=store, run=RUN, seed=plan.seed)
    return produce(
        loader, order, loader_plan, producer=who, store=store, seed=plan.seed, allow_pickle=allow_pickle, pace=pace
    )


def loader_plan_of(plan: Plan) -> LoaderPlan:
    return plan.loaders["data"]
