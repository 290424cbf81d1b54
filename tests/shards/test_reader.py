from __future__ import annotations

import mmap
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from taas.errors import DeliveryError, ObjectCorrupt
from taas_tasks.shards.reader import Lane, read_lane, read_schema
from taas_tasks.shards.schema import FORMAT, Fields, Leaf, Repeat, from_json, to_json
from taas_tasks.shards.writer import EncodedShard, encode_segment
from tests.shards.golden import make
from tests.shards.trees import Record, Sample, same


def encoded(element: Any, *, count: int = 32, allow_pickle: bool = False) -> tuple[bytes, EncodedShard]:
    shard = encode_segment([(n, element) for n in range(count)], allow_pickle=allow_pickle)
    return b"".join(shard.parts), shard


def first_lane(element: Any, *, allow_pickle: bool = False, readable: bool = True) -> Lane:
    data, shard = encoded(element, allow_pickle=allow_pickle)
    schema = read_schema(data[: shard.schema_length], allow_pickle=allow_pickle and readable)
    record = shard.lanes[0]
    return read_lane(bytearray(data[record.offset : record.offset + record.length]), schema)


def test_tensors_and_arrays_are_views_of_the_buffer() -> None:
    data, shard = encoded({"t": torch.zeros(4), "a": np.zeros(3, np.int16), "r": [torch.zeros(2), torch.zeros(5)]})
    record = shard.lanes[0]
    buffer = bytearray(data[record.offset : record.offset + record.length])
    element = read_lane(buffer, read_schema(data[: shard.schema_length]))[0]
    start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    pointers = [element["t"].data_ptr(), element["a"].ctypes.data, *(one.data_ptr() for one in element["r"])]
    assert all(start <= pointer < start + len(buffer) for pointer in pointers)
    assert element["t"].untyped_storage().nbytes() == 16  # saving it does not save its neighbours


def test_writing_into_an_element_of_a_private_mapping_changes_nothing_else(tmp_path: Path) -> None:
    data, shard = encoded(torch.zeros(1000))
    path = tmp_path / "shard"
    path.write_bytes(data)
    with path.open("rb") as file:
        mappings = [
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) for _ in range(2)
        ]
    path.unlink()
    schema, record = read_schema(data[: shard.schema_length]), shard.lanes[0]
    cut = slice(record.offset, record.offset + record.length)
    mine, other = (read_lane(memoryview(one)[cut], schema)[0] for one in mappings)
    mine.add_(1)
    assert float(mine.sum()) == 1000 and float(other.sum()) == 0


def test_a_buffer_that_cannot_be_written_gives_elements_that_can() -> None:
    data, shard = encoded(torch.zeros(3))
    record = shard.lanes[0]
    element = read_lane(data[record.offset : record.offset + record.length], read_schema(data[: shard.schema_length]))[
        0
    ]
    assert element.add_(1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("shift", [0, 8, 24])
def test_every_dtype_works_at_every_offset_that_is_a_multiple_of_8(shift: int) -> None:
    element = (torch.ones(3, dtype=torch.complex128), torch.ones(3, dtype=torch.float64), torch.ones(5).bfloat16())
    data, shard = encoded(element)
    record = shard.lanes[0]
    place = mmap.mmap(-1, shift + record.length)
    place[shift:] = data[record.offset : record.offset + record.length]
    found = read_lane(memoryview(place)[shift:], read_schema(data[: shard.schema_length]))[0]
    assert all(torch.equal(one.clone() + 1, expected + 1) for one, expected in zip(found, element, strict=True))


def test_a_flipped_byte_is_found_by_the_checksum() -> None:
    data, shard = encoded(torch.arange(100))
    record = shard.lanes[3]
    lane = bytearray(data[record.offset : record.offset + record.length])
    lane[-5] ^= 1
    with pytest.raises(ObjectCorrupt, match=r"checksum is 0x[0-9a-f]{8}, not 0x[0-9a-f]{8}"):
        read_lane(lane, read_schema(data[: shard.schema_length]), crc32=record.crc32)


def test_bytes_that_are_no_shard_are_called_corrupt() -> None:
    with pytest.raises(ObjectCorrupt, match="does not begin with an Arrow schema message"):
        read_schema(b"<Error>NoSuchKey</Error>")
    data, shard = encoded(1)
    with pytest.raises(ObjectCorrupt, match="no record batch"):
        read_lane(bytearray(64), read_schema(data[: shard.schema_length]))


@pytest.mark.parametrize(("meta", "name"), [({b"taas.format": b"9"}, "9"), ({}, "none")])
def test_an_unknown_format_version_is_refused_by_name(meta: dict[bytes, bytes], name: str) -> None:
    schema = pa.schema([("x", pa.int64())], metadata=meta)
    with pytest.raises(DeliveryError, match=f"format version '{name}'; known here: 1"):
        read_schema(bytes(schema.serialize()))


@pytest.mark.parametrize(
    "spec",
    [Fields("graph", (), ()), Leaf("money"), Repeat("set", Leaf("int"))],  # type: ignore[arg-type]
)
def test_a_kind_of_value_that_this_release_does_not_know_is_refused_by_name(spec: Any) -> None:
    with pytest.raises(DeliveryError, match=r"of kind '(graph|money|set)'; known here: .*another release"):
        from_json(to_json(Fields("list", (0,), (spec,))))


def test_classes_of_the_project_are_imported_not_unpickled() -> None:
    element = Sample(torch.ones(2), Record("a", 3))
    assert same(first_lane(element)[0], element)


def test_a_class_that_cannot_be_imported_is_named() -> None:
    lost = type("Lost", (Record,), {"__module__": "project_that_is_not_here"})
    with pytest.raises(DeliveryError, match="the dataclass 'project_that_is_not_here:Lost', which cannot be imported"):
        first_lane(lost("a", 1))


def test_a_name_that_is_no_such_class_here_is_refused() -> None:
    fake = type("system", (Record,), {"__module__": "os"})
    with pytest.raises(DeliveryError, match="the dataclass 'os:system', but here that name is <built-in"):
        first_lane(fake("a", 1))


def test_pickles_are_read_only_when_the_request_allows_them() -> None:
    assert first_lane({1, 2}, allow_pickle=True)[0] == {1, 2}
    with pytest.raises(DeliveryError, match="allow_pickle: true"):
        first_lane({1, 2}, allow_pickle=True, readable=False)


def test_rows_outside_a_lane_are_refused() -> None:
    lane = first_lane(1)
    assert list(lane) == [1]
    for row in (-1, 1):
        with pytest.raises(IndexError):
            lane[row]


def test_an_element_survives_saving_and_pickling() -> None:
    element = first_lane({"x": torch.arange(5)})[0]
    assert torch.equal(pickle.loads(pickle.dumps(element))["x"], torch.arange(5))


@pytest.mark.parametrize("name", ["format-1.arrow", "format-1-stream.arrow"])
def test_the_golden_shards_of_format_1_read_as_they_were_written(name: str) -> None:
    elements = dict(make.segments()[name])
    shard = encode_segment(elements.items(), allow_pickle=False)
    data = bytearray((make.FOLDER / name).read_bytes())
    assert data == b"".join(shard.parts)  # what is written today is what was written then
    schema = read_schema(bytes(data[: shard.schema_length]))
    found = {}
    for record in shard.lanes:
        lane = read_lane(memoryview(data)[record.offset : record.offset + record.length], schema, crc32=record.crc32)
        assert {lane.index(row) % 32 for row in range(len(lane))} <= {record.lane}
        found.update({lane.index(row): lane[row] for row in range(len(lane))})
    assert sorted(found) == sorted(elements)
    assert all(same(found[index], elements[index]) for index in elements)


def test_every_format_up_to_the_one_that_is_written_has_golden_shards() -> None:
    versions = {int(path.stem.split("-")[1]) for path in make.FOLDER.glob("format-*.arrow")}
    assert versions == set(range(1, FORMAT + 1))
