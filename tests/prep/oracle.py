"""What must come out: the stream that torch's own DataLoader yields in one process, and how to read what was committed.

Nothing here uses the code that prepares, besides the reader of shards.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from taas.errors import ObjectMissing
from taas_tasks.layout import RunKeys
from taas_tasks.shards.reader import read_lane, read_schema
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LoaderPlan, Plan, ShardRecord


class Item(NamedTuple):
    """An element and its id."""

    epoch: int
    at: int
    element: Any


def local_stream(
    loader: DataLoader[Any], *, seed: int, units: int, passes: Callable[[], Iterator[Any]] | None = None
) -> list[Item]:
    """Return the first ``units`` elements that the loader yields in this process, epoch after epoch.

    ``passes`` starts one pass; the default iterates the loader itself. Calls ``set_epoch`` where there is one.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    found: list[Item] = []
    epoch = 0
    while len(found) < units:
        for part in {id(p): p for p in _parts(loader)}.values():
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        elements = passes() if passes else iter(loader)
        before = len(found)
        found += [Item(epoch, at, e) for at, e in enumerate(islice(elements, units - before))]
        assert len(found) > before, "the loader yields nothing"
        epoch += 1
    return found


def _parts(loader: DataLoader[Any]) -> list[Any]:
    batch_sampler = loader.batch_sampler
    return [loader, batch_sampler, getattr(batch_sampler, "sampler", None), loader.sampler, loader.dataset]


def records_of(store: ObjectStore, run: str, loader: str) -> list[ShardRecord]:
    """Return all records of a loader's ledger in the order of the stream."""
    found = [ShardRecord.model_validate_json(store.get(i.key)) for i in store.list(RunKeys(run).ledger(loader))]
    return sorted(found, key=lambda record: (record.epoch, record.stream, record.n))


class Stored(NamedTuple):
    """What was committed: the stream, and per epoch the padding behind it."""

    stream: list[Item]
    padding: dict[int, list[Item]]


def committed_stream(store: ObjectStore, run: str, loader: str, *, allow_pickle: bool = False) -> Stored:
    """Return what the ledger's shards hold, checked: contiguous, no id twice, lanes and checksums as recorded.

    The streams of a loader that is read by its workers (by the run's plan, where the store has it) are merged.
    """
    found = _plan_of(store, run, loader)
    if found is not None and found.inspection.read_by == "workers":
        return Stored(merged_stream(store, run, found, allow_pickle=allow_pickle), {})
    stream: list[Item] = []
    padding: dict[int, list[Item]] = {}
    awaited = (0, 0, 0)
    for record in records_of(store, run, loader):
        assert (record.epoch, record.n, record.start) == awaited, f"awaited {awaited}, got {record}"
        elements = elements_of(store, record, allow_pickle=allow_pickle)
        assert list(elements) == list(range(record.start, record.stop + record.num_padding))
        items = [Item(record.epoch, at, element) for at, element in elements.items()]
        stream += items[: record.stop - record.start]
        if record.last_of_epoch:
            assert record.epoch_length == record.stop
            assert (record.stop + record.num_padding) % 32 == 0
            padding[record.epoch] = items[record.stop - record.start :]
        awaited = (record.epoch + 1, 0, 0) if record.last_of_epoch else (record.epoch, record.n + 1, record.stop)
    return Stored(stream, padding)


def _plan_of(store: ObjectStore, run: str, loader: str) -> LoaderPlan | None:
    try:
        return Plan.model_validate_json(store.get(RunKeys(run).plan)).loaders[loader]
    except ObjectMissing:
        return None


def merged_stream(store: ObjectStore, run: str, plan: LoaderPlan, *, allow_pickle: bool = False) -> list[Item]:
    """Return the ``units`` elements of the streams in torch's order: round after round, ended streams left out."""
    count = plan.inspection.num_streams
    streams = _streams_of(store, run, plan, allow_pickle=allow_pickle)
    merged: list[Item] = []
    num_read = 0
    for epoch in range(1 + max((epoch for epoch, _ in streams), default=-1)):
        before = len(merged)
        iterators = [iter(streams.get((epoch, number), ())) for number in range(count)]
        alive = list(range(count))
        while alive and len(merged) < plan.units:
            for number in tuple(alive):
                element = next(iterators[number], _END)
                if element is _END:
                    alive.remove(number)
                elif len(merged) < plan.units:
                    merged.append(Item(epoch, len(merged) - before, element))
                    num_read += 1
                else:
                    raise AssertionError(f"stream {number} of epoch {epoch} has an element behind the units")
        assert len(merged) > before or len(merged) == plan.units, f"epoch {epoch} is empty"
    assert num_read == sum(map(len, streams.values())), "more was committed than the units"
    return merged


_END = object()


def _streams_of(
    store: ObjectStore, run: str, plan: LoaderPlan, *, allow_pickle: bool
) -> dict[tuple[int, int], list[Any]]:
    """Return the elements of each stream of each epoch, checked: contiguous, and as recorded."""
    count = plan.inspection.num_streams
    streams: dict[tuple[int, int], list[Any]] = {}
    ended: set[tuple[int, int]] = set()
    next_n: dict[tuple[int, int], int] = {}
    for record in records_of(store, run, plan.loader):
        at = (record.epoch, record.stream)
        own = streams.setdefault(at, [])
        assert (record.n, record.start) == (next_n.get(at, 0), len(own)), f"not contiguous: {record}"
        assert at not in ended, f"behind its stream's end: {record}"
        assert record.num_padding == 0
        assert not record.last_of_units
        assert record.machine == record.stream % plan.machines, f"not its owner's: {record}"
        elements = elements_of(store, record, allow_pickle=allow_pickle)
        assert list(elements) == [position * count + record.stream for position in range(record.start, record.stop)]
        own += elements.values()
        next_n[at] = record.n + 1
        if record.last_of_epoch:
            assert record.epoch_length == record.stop
            ended.add(at)
    return streams


def elements_of(store: ObjectStore, record: ShardRecord, *, allow_pickle: bool = False) -> dict[int, Any]:
    """Return the elements of one shard by their index in the (padded) epoch."""
    data = bytearray(store.get(record.key))
    assert len(data) == record.num_bytes
    schema = read_schema(memoryview(data)[: record.schema_length], allow_pickle=allow_pickle)
    found: dict[int, Any] = {}
    for lane in record.lanes:
        view = memoryview(data)[lane.offset : lane.offset + lane.length]
        rows = read_lane(view, schema, crc32=lane.crc32)
        assert len(rows) == lane.num_elements
        for row in range(len(rows)):
            assert rows.index(row) % 32 == lane.lane
            assert rows.index(row) not in found
            found[rows.index(row)] = rows[row]
    return dict(sorted(found.items()))


def assert_same_stream(got: list[Item], wanted: list[Item]) -> None:
    """Check that two streams are equal: ids in order, and every value with its type."""
    assert [(item.epoch, item.at) for item in got] == [(item.epoch, item.at) for item in wanted]
    for mine, theirs in zip(got, wanted, strict=True):
        assert equal(mine.element, theirs.element), f"element {mine[:2]}: {mine.element!r} is not {theirs.element!r}"


def assert_padding(stored: Stored) -> None:
    """Check that every epoch's padding repeats its first elements, cyclically and bitwise."""
    for epoch, padding in stored.padding.items():
        real = [item.element for item in stored.stream if item.epoch == epoch]
        for place, item in enumerate(padding):
            assert item.at == len(real) + place
            assert equal(item.element, real[place % len(real)])


def equal(mine: Any, theirs: Any) -> bool:
    """Return whether two elements are equal in types, shapes, dtypes and bits."""
    if isinstance(theirs, torch.Tensor):
        return isinstance(mine, torch.Tensor) and mine.dtype == theirs.dtype and _bits(mine) == _bits(theirs)
    if isinstance(theirs, np.ndarray):
        is_alike = isinstance(mine, np.ndarray) and (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        return is_alike and mine.tobytes() == theirs.tobytes()
    if type(mine) is not type(theirs):
        return False
    if isinstance(theirs, Mapping):
        return list(mine) == list(theirs) and all(equal(mine[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(mine) == len(theirs) and all(equal(a, b) for a, b in zip(mine, theirs, strict=True))
    if dataclasses.is_dataclass(theirs):
        return equal(vars(mine), vars(theirs))
    if isinstance(theirs, float):
        return struct.pack("d", mine) == struct.pack("d", theirs)
    return bool(mine == theirs)


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is torch.sparse_coo:
        parts: list[Any] = [tensor._indices(), tensor._values()]
        return tensor.layout, tuple(tensor.shape), tensor.is_coalesced(), *map(_bits, parts)
    if tensor.layout is not torch.strided:
        by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        parts = (
            [tensor.crow_indices(), tensor.col_indices()] if by_rows else [tensor.ccol_indices(), tensor.row_indices()]
        )
        return tensor.layout, tuple(tensor.shape), *map(_bits, [*parts, tensor.values()])
    if tensor.numel() == 0:  # its strides may forbid to look at it as bytes
        return tuple(tensor.shape), b""
    return tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
