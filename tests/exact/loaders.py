"""The table of loader kinds: every kind that is promised to come through exactly has a case here.

``PROMISED`` are the words of the promise; ``test_kinds.py`` fails when one of them has no case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.exact import elements as e

PROMISED_KINDS = (
    *("sequential", "shuffled without generator", "shuffled with generator", "weighted", "with replacement"),
    *("custom sampler", "custom batch_sampler", "infinite sampler", "batch_size=None", "drop_last", "collate_fn"),
    *("__getitems__", "namedtuple", "dataclass", "dict", "list", "str", "bytes", "ragged", "sparse", "bf16", "0-d"),
    *("empty", "worker-aware", "worker-unaware", "infinite iterable", "iterable with batch", "iterable without batch"),
    *("early-ending workers", "worker_init_fn", "lambdas", "set_epoch", "random values", "persistent workers"),
    *("an __iter__ of the user's", "state_dict of the dataset"),
)
PROMISED_RUNS = (
    *("classes of __main__", "element", "exact", "several loaders with their own units", "several epochs"),
    *("remainder pad", "remainder drop", "replays", "more machines than loader workers", "fewer elements than ranks"),
    *("kills and retries", "delivered while prepared"),
)


@dataclass(frozen=True)
class Kind:
    """A loader of ``size`` elements or so, with ``workers`` loader workers (map-style: 0 or more; iterable: as given).

    ``covers``: the words of the promise that it stands for. ``is_told``: with per-element seeding its values are those
    of the bare loader too, as nothing in it is random.
    """

    covers: tuple[str, ...]
    make: Callable[[int, int], DataLoader[Any]]
    is_iterable: bool = False
    is_told: bool = True
    max_workers: int = 8

    @property
    def covered(self) -> set[str]:
        """The words, as a set."""
        return set(self.covers)


def _rows(value: Any, **more: Any) -> Callable[[int, int], DataLoader[Any]]:
    return lambda n, k: DataLoader(e.Rows(n, value), batch_size=None, num_workers=k, **more)


def _one_generator(n: int, k: int) -> DataLoader[Any]:
    one = e.generator(3)
    sampler = RandomSampler(range(n), generator=one)
    return DataLoader(e.Rows(n), batch_size=2, sampler=sampler, generator=one, num_workers=k)


def _weights(n: int) -> list[float]:
    return [at % 7 + 0.5 for at in range(n)]


class Tenfold(DataLoader[Any]):
    """A loader with an ``__iter__`` of its own."""

    def __iter__(self) -> Any:
        return (element * 10 for element in super().__iter__())


MAP: dict[str, Kind] = {
    "in order": Kind(("sequential", "dict"), lambda n, k: DataLoader(e.Rows(n), batch_size=3, num_workers=k)),
    "one by one": Kind(
        ("sequential",),
        lambda n, k: DataLoader(e.Rows(n, e.as_number), batch_size=1, num_workers=k, prefetch_factor=3 if k else None),
    ),
    "shuffled": Kind(
        ("shuffled without generator",), lambda n, k: DataLoader(e.Rows(n), batch_size=2, shuffle=True, num_workers=k)
    ),
    "shuffled by a generator": Kind(
        ("shuffled with generator",),
        lambda n, k: DataLoader(e.Rows(n), batch_size=2, shuffle=True, generator=e.generator(1), num_workers=k),
    ),
    "a generator shared with the sampler": Kind(("shuffled with generator",), _one_generator),
    "weighted": Kind(
        ("weighted",),
        lambda n, k: DataLoader(
            e.Rows(n), batch_size=2, sampler=WeightedRandomSampler(_weights(n), n + 4), num_workers=k
        ),
    ),
    "weighted without replacement": Kind(
        ("weighted",),
        lambda n, k: DataLoader(
            e.Rows(n, e.as_number),
            sampler=WeightedRandomSampler(_weights(n), n, replacement=False, generator=e.generator(6)),
            num_workers=k,
        ),
    ),
    "with replacement": Kind(
        ("with replacement",),
        lambda n, k: DataLoader(
            e.Rows(n),
            batch_size=3,
            sampler=RandomSampler(range(n), replacement=True, num_samples=2 * n + 5),
            num_workers=k,
        ),
    ),
    "with replacement by a generator": Kind(
        ("with replacement",),
        lambda n, k: DataLoader(
            e.Rows(n, e.as_number),
            sampler=RandomSampler(range(n), replacement=True, generator=e.generator(8)),
            num_workers=k,
        ),
    ),
    "more samples than there are": Kind(
        ("custom sampler",),
        lambda n, k: DataLoader(
            e.Rows(n), batch_size=4, sampler=RandomSampler(range(n), num_samples=2 * n + 1), num_workers=k
        ),
    ),
    "a subset": Kind(
        ("shuffled without generator",),
        lambda n, k: DataLoader(
            e.Rows(2 * n), batch_size=3, sampler=SubsetRandomSampler(range(0, 2 * n, 2)), num_workers=k
        ),
    ),
    "a sampler of the user's": Kind(
        ("custom sampler",), lambda n, k: DataLoader(e.Rows(n), batch_size=2, sampler=e.OddFirst(n), num_workers=k)
    ),
    "a sampler that draws as it goes": Kind(
        ("custom sampler",), lambda n, k: DataLoader(e.Rows(n), batch_size=2, sampler=e.ByPython(n), num_workers=k)
    ),
    "a sampler of text": Kind(
        ("custom sampler", "str"), lambda n, k: DataLoader(e.ByKeys(n), batch_size=2, sampler=e.Names(n), num_workers=k)
    ),
    "a list as sampler": Kind(
        ("custom sampler",),
        lambda n, k: DataLoader(e.Rows(n), batch_size=2, sampler=list(range(n))[::-1], num_workers=k),
    ),
    "a batch sampler of torch's": Kind(
        ("custom batch_sampler",),
        lambda n, k: DataLoader(
            e.Rows(n), batch_sampler=BatchSampler(RandomSampler(range(n)), 3, drop_last=False), num_workers=k
        ),
    ),
    "a batch sampler of the user's": Kind(
        ("custom batch_sampler", "set_epoch"),
        lambda n, k: DataLoader(e.Rows(n), batch_sampler=e.Buckets(n), num_workers=k),
    ),
    "epochs that differ": Kind(
        ("custom batch_sampler", "set_epoch"),
        lambda n, k: DataLoader(e.Rows(n), batch_sampler=e.Shrinking(n), num_workers=k),
    ),
    "an infinite sampler": Kind(
        ("infinite sampler",), lambda n, k: DataLoader(e.Rows(n), batch_size=2, sampler=e.Endless(n), num_workers=k)
    ),
    "no batches": Kind(("batch_size=None",), _rows(e.as_row, shuffle=True)),
    "no batches but lists of indices": Kind(
        ("batch_size=None",),
        lambda n, k: DataLoader(
            e.BySets(n), batch_size=None, sampler=BatchSampler(SequentialSampler(range(n)), 3, False), num_workers=k
        ),
    ),
    "drop_last": Kind(
        ("drop_last",),
        lambda n, k: DataLoader(e.Rows(n + 4), batch_size=4, drop_last=True, shuffle=True, num_workers=k),
    ),
    "a collate_fn": Kind(
        ("collate_fn", "ragged", "random values"),
        lambda n, k: DataLoader(e.Rows(n, e.as_ragged), batch_size=3, collate_fn=e.padded, shuffle=True, num_workers=k),
        is_told=False,
    ),
    "a collate_fn that keeps lists": Kind(
        ("collate_fn", "list", "namedtuple"),
        lambda n, k: DataLoader(e.Rows(n, e.as_pair), batch_size=3, collate_fn=e.as_lists, num_workers=k),
    ),
    "__getitems__": Kind(("__getitems__",), lambda n, k: DataLoader(e.Batches(n), batch_size=3, num_workers=k)),
    "namedtuples": Kind(("namedtuple",), lambda n, k: DataLoader(e.Rows(n, e.as_pair), batch_size=2, num_workers=k)),
    "dataclasses": Kind(("dataclass",), _rows(e.as_item)),
    "dicts": Kind(("dict",), _rows(e.as_dict)),
    "lists": Kind(("list",), _rows(e.as_list)),
    "text": Kind(("str",), _rows(e.as_text)),
    "bytes": Kind(("bytes",), _rows(e.as_bytes)),
    "ragged": Kind(("ragged",), _rows(e.as_ragged)),
    "sparse": Kind(("sparse",), _rows(e.as_sparse)),
    "bf16": Kind(("bf16",), lambda n, k: DataLoader(e.Rows(n, e.as_bf16), batch_size=2, num_workers=k)),
    "0-d": Kind(("0-d",), _rows(e.as_zero_dim)),
    "empty tensors": Kind(("empty",), _rows(e.as_empty)),
    "lambdas": Kind(
        ("lambdas",),
        lambda n, k: DataLoader(
            e.Rows(n, lambda index: index * 2), batch_size=2, collate_fn=lambda rows: sum(rows) + 1, num_workers=k
        ),
    ),
    "set_epoch of the dataset": Kind(
        ("set_epoch",), lambda n, k: DataLoader(e.ByEpoch(n), batch_size=2, num_workers=k)
    ),
    "random values": Kind(
        ("random values",),
        lambda n, k: DataLoader(e.Draws(n), batch_size=3, shuffle=True, num_workers=k),
        is_told=False,
    ),
    "a worker_init_fn": Kind(
        ("worker_init_fn",),
        lambda n, k: DataLoader(e.Scaled(n), batch_size=2, shuffle=True, num_workers=max(1, k), worker_init_fn=e.scale),
    ),
    "persistent workers": Kind(
        ("persistent workers",),
        lambda n, k: DataLoader(e.Draws(n), batch_size=2, shuffle=True, num_workers=max(1, k), persistent_workers=True),
        is_told=False,
    ),
    "an __iter__ of the user's": Kind(
        ("an __iter__ of the user's",), lambda n, k: Tenfold(e.Rows(n, e.as_number), shuffle=True, num_workers=k)
    ),
}

ITERABLE: dict[str, Kind] = {
    "shared among workers": Kind(
        ("worker-aware", "iterable with batch", "random values"),
        lambda n, k: DataLoader(e.Shared(n, draws=True), batch_size=2, num_workers=k),
        is_iterable=True,
    ),
    "shared, without batches": Kind(
        ("worker-aware", "iterable without batch"),
        lambda n, k: DataLoader(e.Shared(n), batch_size=None, num_workers=k),
        is_iterable=True,
    ),
    "shared, drops the last": Kind(
        ("worker-aware", "drop_last"),
        lambda n, k: DataLoader(e.Shared(n + 3 * max(1, k)), batch_size=3, drop_last=True, num_workers=k),
        is_iterable=True,
    ),
    "infinite": Kind(
        ("infinite iterable",),
        lambda n, k: DataLoader(e.Shared(None, draws=True), batch_size=3, num_workers=k),
        is_iterable=True,
    ),
    "blocks": Kind(
        ("early-ending workers", "worker-aware"),
        lambda n, k: DataLoader(e.Blocks(n + 1, draws=True), batch_size=None, num_workers=k),
        is_iterable=True,
    ),
    "workers that end early": Kind(
        ("early-ending workers",),
        lambda n, k: DataLoader(
            e.EndsEarly([n * (w % 3) // 2 + (w == 1) for w in range(max(2, k))]), batch_size=2, num_workers=k
        ),
        is_iterable=True,
    ),
    "unaware of workers": Kind(
        ("worker-unaware",), lambda n, k: DataLoader(e.Unaware(n), batch_size=4, num_workers=k), is_iterable=True
    ),
    "epochs that grow": Kind(
        ("set_epoch", "iterable without batch"),
        lambda n, k: DataLoader(e.Growing(n), batch_size=None, num_workers=k),
        is_iterable=True,
    ),
    "an iterable with a collate_fn": Kind(
        ("collate_fn", "iterable with batch"),
        lambda n, k: DataLoader(e.Blocks(n + 1), batch_size=2, collate_fn=lambda rows: {"rows": rows}, num_workers=k),
        is_iterable=True,
    ),
    "an iterable with a worker_init_fn": Kind(
        ("worker_init_fn", "worker-aware"),
        lambda n, k: DataLoader(
            e.Shared(n, draws=True), batch_size=2, num_workers=max(1, k), worker_init_fn=e.seed_worker
        ),
        is_iterable=True,
    ),
    "an iterable with persistent workers": Kind(
        ("persistent workers",),
        lambda n, k: DataLoader(e.Shared(n, draws=True), batch_size=2, num_workers=max(1, k), persistent_workers=True),
        is_iterable=True,
    ),
    "an iterable with a state_dict": Kind(
        ("state_dict of the dataset",),
        lambda n, k: DataLoader(e.Stateful(n), batch_size=2, num_workers=k),
        is_iterable=True,
    ),
}

KINDS: dict[str, Kind] = {**MAP, **ITERABLE}


def make(name: str, size: int, workers: int) -> DataLoader[Any]:
    """Return a fresh loader of a kind; ``workers`` loader workers where the kind leaves that open."""
    return KINDS[name].make(size, workers)
