"""Finding out about a loader before anything costly starts: its order, its elements' size and speed, what would break.

A few elements are loaded and encoded; the same ones are loaded again by another process in another order (by a second
reading, where a loader can only be read in sequence), and what differs is said.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from taas.errors import ElementError, LoaderError, TaasError
from taas_tasks.layout import RunKeys
from taas_tasks.prep.commit import Producer
from taas_tasks.prep.elements import ElementDataset, Failure, Task, loader_of_tasks, owned, set_epoch
from taas_tasks.prep.failures import raised_at, raised_while_waiting
from taas_tasks.prep.order import Order, RecipeOrder, is_recipe
from taas_tasks.prep.order_chunks import ChunkOrder, write_order
from taas_tasks.prep.probe_streams import Probed, probe_streams
from taas_tasks.prep.seeding import seed_start
from taas_tasks.shards.writer import EncodedShard, encode_segment
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import Inspection, Versions

_SAMPLE_ELEMENTS = 16  # fewer than the lanes of a shard: an empty lane shows what a lane costs by itself
_SAMPLE_S = 10.0
_PROBE_TIMEOUT_S = 60.0
_PACKAGES = ("numpy", "pyarrow", "cloudpickle")

Open = Callable[[], DataLoader[Any]]


@dataclass(frozen=True)
class FoundOrder:
    """How a loader's stream is ordered and read. ``order`` is None where only reading it tells."""

    kind: Literal["recipe", "chunks", "sequential"]
    read_by: Literal["index", "workers", "process"]
    num_streams: int = 1
    order: Order | None = None
    epoch_length: int | None = None
    epoch_lengths: list[int] = field(default_factory=list)
    chunk_elements: int = 0
    num_epochs: int = 0
    base_seeds: list[int] = field(default_factory=list)


def inspect_loader(
    open_it: Open,
    *,
    producer: Producer,
    store: ObjectStore,
    seed: int,
    randomness: str,
    units: int,
    allow_pickle: bool,
) -> Inspection:
    """Return what is known of a loader; ``open_it`` gives a fresh one each time.

    Writes the order of a sampler of the user's in chunks. Uses this process's global generators.

    Raises:
        LoaderError: The user's code raised, or the loader yields nothing.
        ElementError: An element fits no column.
    """
    loader = open_it()
    found = find_order(open_it, producer=producer, store=store, seed=seed, randomness=randomness, units=units)
    claimed = _claimed_length(loader)
    order = found.order if found.read_by == "index" else None
    sample = _sample(open_it, order, producer, seed=seed, units=units, epoch_length=found.epoch_length)
    shard = _encode(sample.elements, producer, allow_pickle)
    warnings = _length_warnings(found, claimed, units) + _pickle_warnings(shard)
    warnings += _sequence_warnings(loader, randomness) if found.read_by == "process" else []
    warnings += _generator_warnings(loader) if found.read_by == "workers" and found.kind != "sequential" else []
    warnings += sample.compare(shard, producer, randomness)
    probed = Probed(is_shared=True, has_position=False, warnings=[])
    if found.read_by == "workers" and found.order is None:
        probed = probe_streams(open_it, producer=producer, seed=seed)
    return Inspection(
        loader=producer.loader,
        kind="iterable" if isinstance(loader.dataset, IterableDataset) else "map",
        order=found.kind,
        read_by=found.read_by,
        num_streams=found.num_streams,
        is_shared=probed.is_shared,
        has_position=probed.has_position,
        base_seeds=found.base_seeds if found.read_by == "workers" else [],
        epoch_length=found.epoch_length,
        epoch_lengths=found.epoch_lengths,
        claimed_length=claimed,
        num_loader_workers=loader.num_workers,
        batch_size=loader.batch_size,
        pin_memory=loader.pin_memory,
        element_bytes=_element_bytes(shard),
        element_seconds=sample.element_seconds,
        sampled_elements=len(sample.elements),
        order_chunk_elements=found.chunk_elements,
        order_num_epochs=found.num_epochs,
        warnings=warnings + probed.warnings,
        versions=versions(),
    )


def find_order(
    open_it: Open, *, producer: Producer, store: ObjectStore, seed: int, randomness: str, units: int
) -> FoundOrder:
    """Return the order of a loader and the lengths of its epochs; loads nothing, writes the chunks there are to be.

    Raises:
        LoaderError: The sampler raised or yields nothing.
    """
    loader = open_it()
    read_by = how_it_is_read(loader, randomness)
    if randomness == "exact" and not loader.in_order:
        raise LoaderError(
            f"loader {producer.loader!r}: in_order=False gives another order each time, so it cannot be prepared with"
            ' randomness "exact"; leave in_order at True'
        )
    if read_by == "process":
        return FoundOrder("sequential", read_by)
    num_streams = loader.num_workers if read_by == "workers" else 1
    if isinstance(loader.dataset, IterableDataset):
        return FoundOrder("sequential", read_by, num_streams)
    if not is_recipe(loader):
        written = _write_chunks(open_it, producer, store, seed, units)
        return dataclasses.replace(written, read_by=read_by, num_streams=num_streams)
    recipe = RecipeOrder(loader, seed=seed)
    if recipe.epoch_length == 0:
        raise LoaderError(f"loader {producer.loader!r} yields nothing: its dataset or sampler is empty")
    return FoundOrder("recipe", read_by, num_streams, order=recipe, epoch_length=recipe.epoch_length)


def how_it_is_read(loader: DataLoader[Any], randomness: str) -> Literal["index", "workers", "process"]:
    """Return how a loader's stream can be read: see ``Inspection.read_by``.

    Torch's data pipes are iterated as they are: its iterator sends their workers seeds of their own.
    """
    if type(loader).__iter__ is not DataLoader.__iter__ or isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "process"
    if randomness == "exact" or isinstance(loader.dataset, IterableDataset):
        return "workers" if loader.num_workers > 0 else "process"
    return "index"


def versions() -> Versions:
    """Return the versions of this host that must agree between machines."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return Versions(python=platform.python_version(), torch=torch.__version__, packages=packages)


# --- order and length -----------------------------------------------------------------------------------------------


def _write_chunks(open_it: Open, producer: Producer, store: ObjectStore, seed: int, units: int) -> FoundOrder:
    keys = RunKeys(producer.run)
    written = write_order(open_it(), name=producer.loader, seed=seed, units=units, store=store, keys=keys)
    first, *others = written.lengths
    is_even = all(length == first for length in others[:-1]) and (not others or others[-1] <= first)
    return FoundOrder(
        "chunks",
        "index",
        order=ChunkOrder(store, keys, name=producer.loader, chunk_elements=written.chunk_elements),
        epoch_length=first if is_even else None,
        epoch_lengths=[] if is_even else written.lengths,
        chunk_elements=written.chunk_elements,
        num_epochs=len(written.lengths),
        base_seeds=written.base_seeds,
    )


def _claimed_length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except Exception:  # noqa: BLE001 (many loaders have no length, and it does not matter)
        return None


def _length_warnings(found: FoundOrder, claimed: int | None, units: int) -> list[str]:
    lengths = set(found.epoch_lengths[:-1] or [found.epoch_length or 0])
    if found.kind == "sequential" or claimed is None or lengths == {claimed} or units in lengths:
        return []
    yields = ", ".join(str(length) for length in sorted(lengths)[:5])
    return [f"len() claims {claimed} elements, an iteration yields {yields}; what it yields counts"]


def _sequence_warnings(loader: DataLoader[Any], randomness: str) -> list[str]:
    warnings = []
    if type(loader).__iter__ is not DataLoader.__iter__:
        warnings.append(f"its class {type(loader).__name__} has an __iter__ of its own, so it is read in sequence")
    if randomness == "exact":
        warnings.append('randomness "exact" is read in sequence by one machine; a retry reads again from the start')
    return warnings


def _generator_warnings(loader: DataLoader[Any]) -> list[str]:
    """Warn of a dataset that draws from a generator of the loader's, which loader workers elsewhere have as it was."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    drawn_from = [getattr(one, "generator", None) for one in (loader, *samplers)]
    attributes = getattr(loader.dataset, "__dict__", {})  # a list may be a dataset
    held = [value for value in attributes.values() if isinstance(value, torch.Generator)]
    if not any(one is other for one in held for other in drawn_from):
        return []
    return [
        "its dataset holds the generator that its loader or sampler draws from: its loader workers draw other numbers"
        ' from it than in one process, in spite of randomness "exact"; give the dataset a generator of its own, or use'
        " num_workers=0"
    ]


# --- elements -------------------------------------------------------------------------------------------------------


@dataclass
class _Sample:
    """The first elements, and how to load them again in another way."""

    elements: list[Any]
    element_seconds: float
    again: Callable[[], list[Any]]
    may_fail_again: bool

    def compare(self, shard: EncodedShard, producer: Producer, randomness: str) -> list[str]:
        """Return a warning if the elements are others when they are loaded again."""
        try:
            other = _encode(self.again(), producer, allow_pickle=True)
        except TaasError as error:
            if not self.may_fail_again:
                raise
            return [f"loading the same elements in a second process failed ({error.message}); could not compare them"]
        if other.content_digest == shard.content_digest:
            return []
        advice = (
            'it draws from something that is not seeded per element; ask for randomness "exact", or seed that from the'
            " index"
            if randomness == "element"
            else "it draws from something besides python's, numpy's and torch's global generators"
        )
        return [f"the same elements loaded twice differ: {advice}"]


def _sample(
    open_it: Open, order: Order | None, producer: Producer, *, seed: int, units: int, epoch_length: int | None
) -> _Sample:
    if order is None:
        return _sample_in_sequence(open_it, producer, seed=seed, units=units)
    count = min(_SAMPLE_ELEMENTS, units, epoch_length or units)
    tasks = [Task(0, index, row) for index, row in enumerate(order.rows(0, 0, count))]
    return _sample_by_index(open_it, tasks, producer, seed=seed)


def _sample_by_index(open_it: Open, tasks: list[Task], producer: Producer, *, seed: int) -> _Sample:
    loader = open_it()
    elements: list[Any] = []
    began = time.perf_counter()
    dataset = ElementDataset(loader, seed=seed)
    for task in tasks:
        element = dataset[task]
        if isinstance(element, Failure):
            raise raised_at(element, producer)
        elements.append(owned(element, always=True))
        if time.perf_counter() - began > _SAMPLE_S:
            break
    seconds = (time.perf_counter() - began) / len(elements)
    tasks = tasks[: len(elements)]

    def again() -> list[Any]:
        return _load_in_workers(open_it(), tasks, producer, seed=seed, timeout_s=_PROBE_TIMEOUT_S + 20 * seconds)

    return _Sample(elements, seconds, again, may_fail_again=loader.num_workers == 0)


def _load_in_workers(
    loader: DataLoader[Any], tasks: list[Task], producer: Producer, *, seed: int, timeout_s: float
) -> list[Any]:
    """Return the tasks' elements, loaded by two loader workers in the opposite order."""
    probe = loader_of_tasks(loader, tasks[::-1], seed=seed, num_workers=2)
    # an element that cannot be pickled never arrives: torch's worker only prints the reason
    probe.timeout = probe.timeout or timeout_s
    found: list[Any] = []
    try:
        for element in probe:
            if isinstance(element, Failure):
                raise raised_at(element, producer)
            found.append(owned(element, always=False))
    except TaasError:
        raise
    except Exception as error:  # noqa: BLE001 (user code may raise anything)
        raise raised_while_waiting(error, producer, epoch=0, index=len(tasks) - 1 - len(found)) from None
    return found[::-1]


def _sample_in_sequence(open_it: Open, producer: Producer, *, seed: int, units: int) -> _Sample:
    count = min(_SAMPLE_ELEMENTS, units)
    loader = open_it()
    began = time.perf_counter()
    elements = list(_first_elements(loader, producer, seed=seed, count=count, until=began + _SAMPLE_S))
    if not elements:
        raise LoaderError(f"loader {producer.loader!r} yields nothing: its first iteration has no element")
    seconds = (time.perf_counter() - began) / len(elements) * max(1, loader.num_workers)

    def again() -> list[Any]:
        return list(_first_elements(open_it(), producer, seed=seed, count=len(elements), until=float("inf")))

    return _Sample(elements, seconds, again, may_fail_again=False)


def _first_elements(
    loader: DataLoader[Any], producer: Producer, *, seed: int, count: int, until: float
) -> Iterator[Any]:
    seed_start(seed)
    index = 0
    try:
        set_epoch(loader, 0)
        for element in loader:
            yield owned(element, always=True)
            index += 1
            if index == count or time.perf_counter() > until:
                return
    except TaasError:
        raise
    except Exception as error:  # noqa: BLE001 (user code may raise anything)
        raise raised_while_waiting(error, producer, epoch=0, index=index) from None


# --- columns --------------------------------------------------------------------------------------------------------


def _encode(elements: list[Any], producer: Producer, allow_pickle: bool) -> EncodedShard:
    try:
        return encode_segment(enumerate(elements), allow_pickle=allow_pickle)
    except ElementError as error:
        raise ElementError(f"loader {producer.loader!r}: {error.message}", **error.fields) from None


def _element_bytes(shard: EncodedShard) -> float:
    """Return the bytes of an element without what a lane costs by itself, which an empty lane shows."""
    empty = min((lane.length for lane in shard.lanes if lane.num_elements == 0), default=0)
    used = [lane for lane in shard.lanes if lane.num_elements]
    return max(1.0, sum(lane.length - empty for lane in used) / sum(lane.num_elements for lane in used))


def _pickle_warnings(shard: EncodedShard) -> list[str]:
    if not shard.pickled_paths:
        return []
    return [f"stored pickled, which is slow and runs code where it is read: {', '.join(shard.pickled_paths[:10])}"]
