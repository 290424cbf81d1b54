"""Reading a lane: its elements as torch and numpy views of the bytes, without a copy.

The bytes are to be a writable buffer of the reader's own, such as a private mapping of a file: writing into an element
in place is then safe and seen by nobody else. A buffer that cannot be written is copied once, whole.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from taas.errors import DeliveryError, ObjectCorrupt
from taas_tasks.shards import checksum
from taas_tasks.shards.schema import FORMAT, FORMAT_KEY, SPEC_KEY, Choice, Fields, Leaf, Repeat, Spec, from_json
from taas_tasks.shards.sparse import from_parts
from taas_tasks.shards.storage import Storage, is_fixed, storage_of

Get: TypeAlias = Callable[[int], Any]


@dataclass(frozen=True)
class ShardSchema:
    """What the schema message of a shard says: Arrow's schema and the spec of the elements."""

    arrow: Any
    spec: Spec
    allow_pickle: bool


def read_schema(data: bytes | memoryview, *, allow_pickle: bool = False) -> ShardSchema:
    """Read a schema message (the first ``schema_length`` bytes of a shard).

    Args:
        data: the message.
        allow_pickle: unpickle leaves that were pickled; who can write the store can then run code here.

    Raises:
        ObjectCorrupt: these bytes are no schema message of a shard.
        DeliveryError: a format version that this reader does not know.
    """
    try:
        arrow = pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise ObjectCorrupt(f"a shard does not begin with an Arrow schema message: {error}") from error
    meta = arrow.metadata or {}
    version = meta.get(FORMAT_KEY, b"none").decode(errors="replace")
    if version != str(FORMAT):
        raise DeliveryError(
            f"a shard has format version '{version}'; known here: {FORMAT}. It was written by another release: "
            "prepare and train with the same one",
            version=version,
        )
    return ShardSchema(arrow=arrow, spec=from_json(json.loads(meta[SPEC_KEY])), allow_pickle=allow_pickle)


class Lane:
    """The elements of one lane of a segment, in the order of their indices; ``lane[row]`` makes one.

    Each element has storage of its own (saving one does not save its neighbours), which keeps the buffer alive.
    """

    __slots__ = ("_get", "_indices", "_length")

    def __init__(self, get: Get, indices: Any) -> None:
        self._get = get
        self._indices = indices
        self._length = len(indices)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < self._length:
            raise IndexError(f"row {row} of a lane with {self._length} elements")
        return self._get(row)

    @property
    def get(self) -> Get:
        """What makes an element of a row that the lane has; it does not check that."""
        return self._get

    def index(self, row: int) -> int:
        """Return the index in the (padded) epoch of the element at ``row``."""
        return int(self._indices[row].as_py())

    def __iter__(self) -> Iterator[Any]:
        return map(self._get, range(self._length))


def read_lane(buffer: Any, schema: ShardSchema, *, crc32: int | None = None) -> Lane:
    """Open a lane; nothing is copied from a writable buffer.

    Args:
        buffer: exactly the bytes of the lane (``LaneRecord.offset`` and ``length``), at an address divisible by 8.
        schema: of the same shard.
        crc32: check the bytes against it.

    Raises:
        ObjectCorrupt: the checksum differs, or the bytes are no record batch of this schema.
        DeliveryError: the elements hold a class that cannot be imported here, or pickles that may not be read.
    """
    data = memoryview(buffer).cast("B")
    if crc32 is not None and (got := checksum.crc32(data)) != crc32:
        raise ObjectCorrupt(f"a lane's checksum is {got:#010x}, not {crc32:#010x} as when it was written")
    if data.readonly:
        data = memoryview(bytearray(data))
    whole = pa.py_buffer(data)
    try:
        batch = pa.ipc.read_record_batch(whole, schema.arrow)
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise ObjectCorrupt(f"a lane is no record batch of its shard's schema: {error}") from error
    columns = iter(batch.columns)
    indices = next(columns)
    return Lane(_Compiler(data, whole.address, schema.allow_pickle).getter(schema.spec, columns), indices)


@dataclass(frozen=True)
class _Compiler:
    """Turns a spec and its columns into a function from a row to the value."""

    data: memoryview
    address: int
    allow_pickle: bool

    def getter(self, spec: Spec, columns: Iterator[Any]) -> Get:
        if isinstance(spec, Leaf):
            return self._leaf(spec, columns)
        if isinstance(spec, Fields):
            return _fields_getter(spec, [self.getter(child, columns) for child in spec.children])
        column = next(columns)
        if len(column) == 0:
            return _no_row  # pyarrow 26 crashes on the type codes of a union that was read without rows
        return self._repeat(spec, column) if isinstance(spec, Repeat) else self._choice(spec, column)

    def _start(self, column: Any) -> int:
        buffer = column.buffers()[-1]
        return 0 if buffer is None else buffer.address - self.address

    def _leaf(self, spec: Leaf, columns: Iterator[Any]) -> Get:
        column = next(columns)
        if spec.kind in ("tensor", "ndarray", "scalar"):
            get = self._fixed(spec, column) if is_fixed(spec) else self._ragged(spec, column, columns)
            return (lambda row: get(row)[()]) if spec.kind == "scalar" else get
        if spec.kind in ("bytes", "pickle"):
            return self._binary(spec, column)
        if spec.kind == "complex":
            parts = column.values.to_numpy(zero_copy_only=False).view(np.complex128).tolist()
            return parts.__getitem__  # type: ignore[no-any-return]
        values = column.to_pylist()
        return [int(value) for value in values].__getitem__ if spec.kind == "bigint" else values.__getitem__

    def _fixed(self, spec: Leaf, column: Any) -> Get:
        storage, shape = storage_of(spec), spec.shape or ()
        stride = math.prod(shape) * storage.item_bytes
        make, start = _maker(storage, self.data), self._start(column)
        if stride == 0:
            return lambda row: make(shape, 0)
        if _is_plain(storage):  # the same as below with fewer calls: it is what most elements are made of
            ndarray, dtype, data, from_numpy = np.ndarray, storage.numpy, self.data, torch.from_numpy
            return lambda row: from_numpy(ndarray(shape, dtype, data, start + row * stride))
        return lambda row: make(shape, start + row * stride)

    def _ragged(self, spec: Leaf, column: Any, columns: Iterator[Any]) -> Get:
        storage = storage_of(spec)
        offsets, start = column.offsets.to_pylist(), self._start(column)
        shapes = [tuple(shape) for shape in next(columns).to_pylist()]
        value_bytes = storage.item_bytes // storage.per_item
        make = _maker(storage, self.data)
        return lambda row: make(shapes[row], start + offsets[row] * value_bytes)

    def _binary(self, spec: Leaf, column: Any) -> Get:
        offsets = np.frombuffer(column.buffers()[1] or b"", np.int64)[: len(column) + 1].tolist()
        start, data = self._start(column), self.data
        if spec.kind == "bytes":
            return lambda row: bytes(data[start + offsets[row] : start + offsets[row + 1]])
        if not self.allow_pickle:
            raise DeliveryError(
                "elements hold pickled values, which are read only when the request says so: set allow_pickle: true"
            )
        return lambda row: pickle.loads(data[start + offsets[row] : start + offsets[row + 1]])

    def _split(self, spec: Spec, array: Any) -> Get:
        """Read an array that holds all columns of a node: a struct, one column, or nothing."""
        wide = pa.types.is_struct(array.type) and _num_columns(spec) > 1
        return self.getter(spec, iter(array.flatten() if wide else [array]))

    def _repeat(self, spec: Repeat, column: Any) -> Get:
        offsets, item = column.offsets.to_pylist(), self._split(spec.item, column.values)
        make: Any = list if spec.kind == "list" else tuple
        return lambda row: make(map(item, range(offsets[row], offsets[row + 1])))

    def _choice(self, spec: Choice, column: Any) -> Get:
        kinds, offsets = column.type_codes.to_pylist(), column.offsets.to_pylist()
        gets = [self._split(option, column.field(place)) for place, option in enumerate(spec.options)]
        return lambda row: gets[kinds[row]](offsets[row])


def _no_row(row: int) -> Any:
    raise IndexError(f"row {row} of a column without rows")


def _num_columns(spec: Spec) -> int:
    if isinstance(spec, Fields):
        return sum(_num_columns(child) for child in spec.children)
    if isinstance(spec, Leaf) and spec.kind in ("tensor", "ndarray", "scalar"):
        return 1 if is_fixed(spec) else 2
    return 1


def _is_plain(storage: Storage) -> bool:
    """Whether a view by numpy is the tensor as it is."""
    return storage.torch is not None and not storage.reinterpret and storage.torch is not torch.complex128


def _maker(storage: Storage, data: memoryview) -> Callable[[tuple[int, ...], int], Any]:
    """Return a function from a shape and a byte offset to a view. An empty one may not begin at the buffer's end."""
    ndarray, dtype, from_numpy, kind = np.ndarray, storage.numpy, torch.from_numpy, storage.torch
    if kind is None:
        return lambda shape, offset: ndarray(shape, dtype, data, offset) if 0 not in shape else np.empty(shape, dtype)

    copy = kind is torch.complex128  # torch crashes unless its address is divisible by 16; Arrow gives 8

    def tensor(shape: tuple[int, ...], offset: int) -> torch.Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=kind)
        view = ndarray(shape, dtype, data, offset)
        return from_numpy(view.copy() if copy else view)

    return (lambda shape, offset: tensor(shape, offset).view(kind)) if storage.reinterpret else tensor


def _fields_getter(spec: Fields, gets: list[Get]) -> Get:
    keys = spec.keys
    if spec.kind == "list":
        return lambda row: [get(row) for get in gets]
    if spec.kind == "tuple":
        return lambda row: tuple([get(row) for get in gets])
    pairs = list(zip(keys, gets, strict=True))
    if spec.kind == "dict":
        return lambda row: {key: get(row) for key, get in pairs}
    if spec.kind == "ordered":
        return lambda row: collections.OrderedDict((key, get(row)) for key, get in pairs)
    if spec.kind == "sparse":
        return lambda row: from_parts(spec.of or "", {str(key): get(row) for key, get in pairs})
    kind = _find_class(spec)
    if spec.kind == "namedtuple":
        return lambda row: kind(*[get(row) for get in gets])
    if spec.kind == "userdict":
        return lambda row: kind({key: get(row) for key, get in pairs})
    return lambda row: _rebuild(kind, pairs, row)


def _rebuild(kind: Any, pairs: list[tuple[Any, Get]], row: int) -> Any:
    value = object.__new__(kind)  # as unpickling would: __init__ and __post_init__ ran when it was made
    for name, get in pairs:
        object.__setattr__(value, name, get(row))
    return value


_IS_OF_KIND: dict[str, Callable[[Any], bool]] = {
    "namedtuple": lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"),
    "dataclass": dataclasses.is_dataclass,
    "userdict": lambda kind: issubclass(kind, collections.UserDict),
}


def _find_class(spec: Fields) -> Any:
    module, _, qualname = (spec.of or "").partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise DeliveryError(
            f"elements are of the {spec.kind} '{spec.of}', which cannot be imported here ({error}); define it at the "
            "top level of a module of the project, or give plain dicts and tuples from collate_fn",
            of=spec.of,
        ) from error
    if not (isinstance(found, type) and _IS_OF_KIND[spec.kind](found)):
        raise DeliveryError(f"elements are of the {spec.kind} '{spec.of}', but here that name is {found!r}", of=spec.of)
    return found
