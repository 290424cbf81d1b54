"""The order of a sampler of the user's: run once, written down in chunks, read back by any machine.

A chunk is an Arrow IPC file of one column, one row per element: ``list<int64>`` (a batch of indices), ``int64`` (one
index), or JSON text for other keys (strings, tensors, arrays, tuples), with their types. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader

from taas.errors import LoaderError, ObjectMissing
from taas_tasks.layout import RunKeys
from taas_tasks.prep.elements import describe, set_epoch, users_traceback
from taas_tasks.prep.order import index_sampler
from taas_tasks.prep.seeding import seed_start
from taas_tasks.store.base import ObjectStore

_log = logging.getLogger(__name__)
_CHUNK_INDICES = 1 << 20
_MAX_CHUNK_ELEMENTS = 1 << 16
_KEPT_CHUNKS = 4


class TakesChunks(Protocol):
    """Where the chunks of an order go: a store."""

    def put(self, key: str, data: bytes, /) -> None:
        """Write an object."""


@dataclass(frozen=True)
class WrittenOrder:
    """What a pass over the sampler showed. ``lengths``: elements of each epoch, the last one cut at the units.

    ``base_seeds``: of the loader workers, per epoch (of the first one alone, if they are persistent).
    """

    lengths: list[int]
    chunk_elements: int
    base_seeds: list[int]


def write_order(
    loader: DataLoader[Any], *, name: str, seed: int, units: int, store: TakesChunks, keys: RunKeys
) -> WrittenOrder:
    """Run the loader's sampler for ``units`` elements, epoch after epoch as in one process, and write its rows.

    Seeds this process's global generators as a script does (``seed_start``) and uses the loader up: open another one
    for loading elements. An infinite sampler is cut at ``units``.

    Raises:
        LoaderError: The sampler raised, an epoch of it is empty, or a row cannot be written down.
    """
    seed_start(seed)
    lengths: list[int] = []
    base_seeds: list[int] = []
    chunk_elements = 0
    while sum(lengths) < units:
        epoch = len(lengths)
        rows = _rows_of_epoch(loader, name, epoch, base_seeds)
        length = 0
        for chunk in _chunks(rows, limit=units - sum(lengths), size=chunk_elements):
            chunk_elements = chunk_elements or _chunk_elements(chunk[0])
            store.put(keys.order_chunk(name, epoch, length // chunk_elements), _encode(chunk))
            length += len(chunk)
        if length == 0:
            raise LoaderError(
                f"loader {name!r}: its sampler yields nothing in epoch {epoch}, {units - sum(lengths)} of {units} units"
                " are missing; a sampler must be iterable again and again"
            )
        lengths.append(length)
    return WrittenOrder(lengths, chunk_elements, base_seeds)


def write_lost_chunks(
    loader: DataLoader[Any], *, name: str, seed: int, units: int, store: ObjectStore, keys: RunKeys
) -> None:
    """Write again what is gone of an order; like ``write_order`` it seeds this process and uses the loader up.

    Raises:
        LoaderError: What is still there of the order is not what the sampler gives now.
    """
    _log.warning("chunks of the order of loader %r are gone; its sampler is run again", name)
    missing = _MissingOnly(store, name)
    write_order(loader, name=name, seed=seed, units=units, store=missing, keys=keys)
    for key, data in missing.found.items():
        store.put(key, data)


class _MissingOnly:
    """Takes what ``write_order`` puts: keeps the chunks that are gone, and compares the others."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store, self._name = store, name
        self.found: dict[str, bytes] = {}

    def put(self, key: str, data: bytes, /) -> None:
        try:
            there = self._store.get(key)
        except ObjectMissing:
            self.found[key] = data
            return
        if there != data:
            raise LoaderError(
                f"loader {self._name!r}: a part of the order that its sampler gave is gone, and run again it gives"
                f" another one (in {key}): it draws from something besides python's, numpy's and torch's generators."
                " Start the run anew"
            )


def _chunks(rows: Iterator[Any], *, limit: int, size: int) -> Iterator[list[Any]]:
    rows = islice(rows, limit)
    if not size:
        first = list(islice(rows, 1))
        if not first:
            return
        size = _chunk_elements(first[0])
        yield first + list(islice(rows, size - 1))
    while chunk := list(islice(rows, size)):
        yield chunk


def _chunk_elements(row: Any) -> int:
    in_row = len(row) if isinstance(row, (list, tuple)) else 1
    return max(1, min(_MAX_CHUNK_ELEMENTS, _CHUNK_INDICES // max(1, in_row)))


def _rows_of_epoch(loader: DataLoader[Any], name: str, epoch: int, base_seeds: list[int]) -> Iterator[Any]:
    """Yield one pass of the sampler, drawing random numbers where ``iter(loader)`` and its workers draw them.

    Appends the loader workers' base seed where one is drawn.
    """
    set_epoch(loader, epoch)
    has_workers = loader.num_workers > 0
    try:
        rows = iter(index_sampler(loader))
        if epoch == 0 or not (loader.persistent_workers and has_workers):
            drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            base_seeds.append(int(drawn.item()))
            # torch's iterator over worker processes starts the sampler a second time and uses that
            rows = iter(index_sampler(loader)) if has_workers else rows
        # written in the loop: a sampler may yield one list again and again, or views of an array that it shuffles
        yield from (_kept(row, name) for row in rows)
    except LoaderError:
        raise
    except Exception as error:  # noqa: BLE001 (user code may raise anything)
        message = f"loader {name!r}: its sampler raised in epoch {epoch}: {describe(error)}"
        raise LoaderError(message, traceback=users_traceback(error)) from None


# --- one chunk ------------------------------------------------------------------------------------------------------


def _encode(rows: list[Any]) -> bytes:
    if all(type(row) is int for row in rows):
        column, form = pa.array(rows, pa.int64()), "int"
    elif _are_batches(rows):
        column, form = pa.array(rows, pa.list_(pa.int64())), "list"
    else:
        column, form = pa.array([json.dumps(_tagged(row)) for row in rows], pa.string()), "json"
    table = pa.table({"row": column}).replace_schema_metadata({"form": form})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _are_batches(rows: list[Any]) -> bool:
    return all(type(row) is list and set(map(type, row)) <= {int} for row in rows)


def _decode(data: bytes) -> list[Any]:
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    rows: list[Any] = table.column("row").to_pylist()
    if table.schema.metadata[b"form"] == b"json":
        return [_untagged(json.loads(row)) for row in rows]
    return rows


def _kept(key: Any, name: str) -> Any:
    """Return a sampler's key as it is now: containers, tensors and arrays are copied."""
    if isinstance(key, (bool, int, float, str)) or key is None:
        return key
    if isinstance(key, torch.Tensor) and key.layout is torch.strided:
        return key.detach().clone()
    if isinstance(key, (np.ndarray, np.generic)) and key.dtype.kind in "biufUS":
        return key.copy()
    if type(key) in (list, tuple):
        return type(key)(_kept(part, name) for part in key)
    raise LoaderError(
        f"loader {name!r}: its sampler yields keys of type {type(key).__name__}; allowed: numbers, strings, tensors and"
        " arrays of them, and lists or tuples of these (keys travel between machines, and nothing is unpickled there)"
    )


def _tagged(key: Any) -> Any:
    """Return a key as JSON that tells its types: the dataset is given what its sampler yields."""
    if isinstance(key, list) and len(types := set(map(type, key))) == 1 and issubclass(types.pop(), np.number):
        return {"numpy list": [key[0].dtype.str, [part.item() for part in key]]}
    if isinstance(key, (list, tuple)):
        return {"list" if isinstance(key, list) else "tuple": [_tagged(part) for part in key]}
    if isinstance(key, torch.Tensor):
        return {"tensor": [str(key.dtype).removeprefix("torch."), key.tolist()]}
    if isinstance(key, np.generic):
        return {"numpy": [key.dtype.str, key.item()]}
    return {"ndarray": [key.dtype.str, key.tolist()]} if isinstance(key, np.ndarray) else key


_UNTAGGED: dict[str, Callable[[Any], Any]] = {
    "list": lambda parts: [_untagged(part) for part in parts],
    "tuple": lambda parts: tuple(_untagged(part) for part in parts),
    "tensor": lambda parts: torch.tensor(parts[1], dtype=getattr(torch, parts[0])),
    "numpy": lambda parts: np.array(parts[1], parts[0])[()],
    "numpy list": lambda parts: list(np.array(parts[1], parts[0])),
    "ndarray": lambda parts: np.array(parts[1], parts[0]),
}


def _untagged(key: Any) -> Any:
    if isinstance(key, dict):
        ((kind, parts),) = key.items()
        return _UNTAGGED[kind](parts)
    return key


# --- reading --------------------------------------------------------------------------------------------------------


class ChunkOrder:
    """The order that ``write_order`` wrote; keeps the few chunks read last.

    ``write_again`` puts chunks that are gone; it is called once, as an epoch's end looks the same.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        *,
        name: str,
        chunk_elements: int,
        write_again: Callable[[], None] | None = None,
    ) -> None:
        self._write_again = write_again
        self._store = store
        self._keys = keys
        self._name = name
        self._chunk_elements = chunk_elements
        self._kept: dict[tuple[int, int], list[Any]] = {}

    def rows(self, epoch: int, start: int, stop: int) -> list[Any]:
        """Return the rows of elements [start, stop) of an epoch; cut at the epoch's end."""
        found: list[Any] = []
        while start < stop:
            number, offset = divmod(start, self._chunk_elements)
            part = self._chunk(epoch, number)[offset : offset + stop - start]
            if not part:
                break
            found += [_kept(row, self._name) for row in part]  # a dataset may change the list that it is given
            start += len(part)
        return found

    def _chunk(self, epoch: int, number: int) -> list[Any]:
        if (epoch, number) not in self._kept:
            data = self._get(self._keys.order_chunk(self._name, epoch, number))
            if data is None:
                return []
            self._kept[epoch, number] = _decode(data)
            while len(self._kept) > _KEPT_CHUNKS:
                del self._kept[next(iter(self._kept))]
        return self._kept[epoch, number]

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except ObjectMissing:
            if self._write_again is None:
                return None
        again, self._write_again = self._write_again, None
        again()
        return self._get(key)
