"""Encoding a segment: its elements as an Arrow IPC stream with one record batch per lane."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import pyarrow as pa
import torch

from taas_tasks.shards.checksum import crc32
from taas_tasks.shards.lanes import LANES_IN_FILE_ORDER, NUM_LANES, lane_of
from taas_tasks.shards.schema import (
    FORMAT,
    FORMAT_KEY,
    SPEC_KEY,
    Describer,
    Fields,
    Leaf,
    Repeat,
    Spec,
    merge,
    option_of,
    to_json,
)
from taas_tasks.shards.sparse import parts_of
from taas_tasks.shards.storage import Storage, is_fixed, num_values, storage_of
from taas_tasks.values import LaneRecord

INDEX_COLUMN = "taas.index"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

Columns: TypeAlias = list[tuple[str, Any]]


@dataclass(frozen=True)
class EncodedShard:
    """A segment, ready to be put: ``parts`` in order are the object; they are never joined here.

    ``content_digest`` is a sha256 over the lengths and checksums of the schema and of the lanes in the file's order:
    equal elements give an equal digest, and to hash the bytes a second time would cost more than all else here.
    """

    parts: list[memoryview]
    schema_length: int
    schema_crc32: int
    lanes: list[LaneRecord]
    num_bytes: int
    content_digest: str
    pickled_paths: list[str]


def encode_segment(elements: Iterable[tuple[int, Any]], *, allow_pickle: bool) -> EncodedShard:
    """Encode the elements of a segment, given with their index in the (padded) epoch in ascending order.

    The values are those of the elements: strides, ``requires_grad`` and aliasing between leaves are not kept.

    Raises:
        ElementError: an element fits no column and ``allow_pickle`` is False; names the path in it.
    """
    describer = Describer(allow_pickle=allow_pickle)
    rows: list[list[tuple[int, Any]]] = [[] for _ in range(NUM_LANES)]
    spec: Spec | None = None
    for index, element in elements:
        rows[lane_of(index)].append((index, element))
        found = describer.describe(element)
        spec = found if spec is None else merge(spec, found)
    return _assemble(rows, spec or Leaf("none"), sorted(describer.pickled_paths))


def _assemble(rows: list[list[tuple[int, Any]]], spec: Spec, pickled_paths: list[str]) -> EncodedShard:
    stream = _Stream(_schema(spec))
    lanes = []
    for lane in LANES_IN_FILE_ORDER:
        offset, (length, crc) = stream.num_bytes, stream.add(_batch(rows[lane], spec))
        lanes.append(LaneRecord(lane=lane, offset=offset, length=length, num_elements=len(rows[lane]), crc32=crc))
        rows[lane] = []  # the encoded copy replaces the elements: memory stays near one segment
    schema_length, schema_crc32 = stream.head
    sums = [stream.head, *((lane.length, lane.crc32) for lane in lanes)]
    return EncodedShard(
        parts=[*stream.parts, memoryview(_END_OF_STREAM)],
        schema_length=schema_length,
        schema_crc32=schema_crc32,
        lanes=lanes,
        num_bytes=stream.num_bytes + len(_END_OF_STREAM),
        content_digest=hashlib.sha256(b"".join(struct.pack("<QI", *one) for one in sums)).hexdigest(),
        pickled_paths=pickled_paths,
    )


class _Sink:
    """What Arrow writes a stream to: keeps the buffers that it is given, without a copy."""

    closed = False

    def __init__(self) -> None:
        self.taken: list[memoryview] = []

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.taken.append(view)
        return view.nbytes

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The stream is ended by whoever joins the parts."""


class _Stream:
    """The messages of an Arrow IPC stream: the schema, then a record batch per lane."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._sink = _Sink()
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._sink, mode="w"), schema)
        head = memoryview(schema.serialize())
        self.parts = [head]
        self.num_bytes = len(head)
        self.head = len(head), crc32(head)
        self._to_skip = len(head)  # the writer brings the schema again, together with the first batch

    def add(self, batch: Any) -> tuple[int, int]:
        """Add a record batch; return its length and checksum."""
        self._writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=self._schema))
        length = crc = 0
        for part in self._sink.taken:
            if self._to_skip:
                self._to_skip -= len(part)
                continue
            crc = crc32(part, crc)
            length += len(part)
            self.parts.append(part)
        self._sink.taken.clear()
        self.num_bytes += length
        return length, crc


def _batch(rows: list[tuple[int, Any]], spec: Spec) -> Any:
    indices = pa.array([index for index, _ in rows], pa.int64())
    columns = [(INDEX_COLUMN, indices), *_columns(spec, [element for _, element in rows], "")]
    return pa.RecordBatch.from_arrays([array for _, array in columns], names=_unique([name for name, _ in columns]))


def _unique(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    for place, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[place] = f"{name}#{place}"
    return names


def _schema(spec: Spec) -> Any:
    meta = {FORMAT_KEY: str(FORMAT).encode(), SPEC_KEY: json.dumps(to_json(spec), separators=(",", ":")).encode()}
    return _batch([], spec).schema.with_metadata(meta)


def _columns(spec: Spec, values: list[Any], name: str) -> Columns:
    """Return the columns that hold ``values``; their types depend on the spec alone."""
    if isinstance(spec, Leaf):
        return _LEAVES[spec.kind](spec, values, name or "element")
    if isinstance(spec, Fields):
        return _field_columns(spec, values, name)
    return [(name or "element", (_repeat_column if isinstance(spec, Repeat) else _choice_column)(spec, values))]


def _field_columns(spec: Fields, values: list[Any], name: str) -> Columns:
    take = _TAKE[spec.kind]
    columns: Columns = []
    for key, child in zip(spec.keys, spec.children, strict=True):
        columns += _columns(child, [take(value, key) for value in values], f"{name}.{key}" if name else str(key))
    return columns


_TAKE: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("dict", "ordered", "list", "tuple", "userdict"), lambda value, key: value[key]),
    **dict.fromkeys(("namedtuple", "dataclass"), getattr),
    "sparse": lambda value, key: (parts_of(value) or {})[key],
}


def _as_one(columns: Columns, length: int) -> Any:
    if not columns:
        return pa.nulls(length)
    if len(columns) == 1:
        return columns[0][1]
    return pa.StructArray.from_arrays([array for _, array in columns], names=_unique([name for name, _ in columns]))


def _repeat_column(spec: Any, values: list[Any]) -> Any:
    items = [item for value in values for item in value]
    child = _as_one(_columns(spec.item, items, ""), len(items))
    return _large_list([len(value) for value in values], child)


def _choice_column(spec: Any, values: list[Any]) -> Any:
    describer = Describer(allow_pickle=True)  # what may not be pickled has been refused before
    kinds = [option_of(spec, describer.describe(value)) for value in values]
    split: list[list[Any]] = [[] for _ in spec.options]
    offsets = []
    for kind, value in zip(kinds, values, strict=True):
        offsets.append(len(split[kind]))
        split[kind].append(value)
    children = [_as_one(_columns(option, own, ""), len(own)) for option, own in zip(spec.options, split, strict=True)]
    return pa.UnionArray.from_dense(pa.array(kinds, pa.int8()), pa.array(offsets, pa.int32()), children)


def _large_list(lengths: list[int], child: Any) -> Any:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    kind = pa.large_list(child.type)
    return pa.Array.from_buffers(kind, len(lengths), [None, pa.py_buffer(offsets)], children=[child])


def _simple(kind: Any, convert: Callable[[Any], Any] | None = None) -> Callable[[Leaf, list[Any], str], Columns]:
    def columns(_: Leaf, values: list[Any], name: str) -> Columns:
        return [(name, pa.array([convert(value) for value in values] if convert else values, kind))]

    return columns


def _complex_columns(_: Leaf, values: list[Any], name: str) -> Columns:
    parts = np.array(values, np.complex128).view(np.float64)
    return [(name, pa.FixedSizeListArray.from_arrays(pa.array(parts), 2))]


def _tensor_columns(spec: Leaf, values: list[Any], name: str) -> Columns:
    storage = storage_of(spec)
    plain = [one.detach().resolve_conj().resolve_neg() for one in values]
    through = _READ_AS[storage.item_bytes] if storage.reinterpret else None
    arrays = [(one.view(through) if through else one).numpy() for one in plain]
    return _dense_columns(spec, arrays, name)


_READ_AS = {1: torch.uint8, 2: torch.int16}


def _array_columns(spec: Leaf, values: list[Any], name: str) -> Columns:
    return _dense_columns(spec, [np.asarray(one) for one in values], name)


def _flat_bytes(array: Any) -> Any:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8) if flat.size > 1 else np.frombuffer(flat.tobytes(), np.uint8)


def _dense_columns(spec: Leaf, arrays: list[Any], name: str) -> Columns:
    storage, flat = storage_of(spec), [_flat_bytes(one) for one in arrays]
    data = _values(flat, storage)
    if is_fixed(spec):
        kind = pa.list_(storage.arrow, num_values(spec))
        return [(name, pa.Array.from_buffers(kind, len(flat), [None], children=[data]))]
    value_bytes = storage.item_bytes // storage.per_item
    dims = pa.array([size for one in arrays for size in one.shape], pa.int64())
    return [
        (name, _large_list([len(one) // value_bytes for one in flat], data)),
        (f"{name}.shape", _large_list([one.ndim for one in arrays], dims)),
    ]


def _values(flat: list[Any], storage: Storage) -> Any:
    joined = np.concatenate(flat) if flat else np.empty(0, np.uint8)
    count = len(joined) * storage.per_item // storage.item_bytes
    return pa.Array.from_buffers(storage.arrow, count, [None, pa.py_buffer(joined)])


_LEAVES: dict[str, Callable[[Leaf, list[Any], str], Columns]] = {
    "tensor": _tensor_columns,
    "ndarray": _array_columns,
    "scalar": _array_columns,
    "int": _simple(pa.int64()),
    "bigint": _simple(pa.large_utf8(), str),
    "float": _simple(pa.float64()),
    "complex": _complex_columns,
    "bool": _simple(pa.bool_()),
    "str": _simple(pa.large_utf8()),
    "bytes": _simple(pa.large_binary()),
    "none": _simple(pa.null()),
    "pickle": _simple(pa.large_binary(), cloudpickle.dumps),
}
