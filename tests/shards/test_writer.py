from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taas.errors import ElementError
from taas_tasks.shards.lanes import LANES_IN_FILE_ORDER, lane_of, row_of
from taas_tasks.shards.reader import read_lane, read_schema
from taas_tasks.shards.writer import EncodedShard, encode_segment
from tests.shards.trees import same, trees


def joined(shard: EncodedShard) -> bytearray:
    return bytearray(b"".join(shard.parts))


def decoded(shard: EncodedShard, *, allow_pickle: bool = False) -> dict[int, Any]:
    data = joined(shard)
    schema = read_schema(bytes(data[: shard.schema_length]), allow_pickle=allow_pickle)
    found = {}
    for record in shard.lanes:
        lane = read_lane(memoryview(data)[record.offset : record.offset + record.length], schema, crc32=record.crc32)
        assert len(lane) == record.num_elements
        found.update({lane.index(row): lane[row] for row in range(len(lane))})
    return found


def round_trip(elements: list[Any], *, start: int = 0, allow_pickle: bool = False) -> list[Any]:
    shard = encode_segment(enumerate(elements, start), allow_pickle=allow_pickle)
    found = decoded(shard, allow_pickle=allow_pickle)
    assert sorted(found) == list(range(start, start + len(elements)))
    return [found[index] for index in sorted(found)]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=trees, count=st.integers(1, 3))
def test_equal_elements_come_back_the_same(tree: Any, count: int) -> None:
    assert all(same(tree, back) for back in round_trip([tree] * count))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(elements=st.lists(trees, min_size=1, max_size=6))
def test_elements_of_different_forms_in_one_segment_come_back_the_same(elements: list[Any]) -> None:
    assert all(same(*pair) for pair in zip(elements, round_trip(elements), strict=True))


def test_shapes_that_differ_are_kept() -> None:
    elements = [{"x": torch.arange(n * 3).reshape(n, 3), "n": n} for n in (4, 0, 7, 1)]
    assert all(same(*pair) for pair in zip(elements, round_trip(elements), strict=True))


def test_a_shorter_last_batch_of_strings_and_tensors_comes_back_the_same() -> None:
    elements = [[torch.ones(n, 2), [str(i) for i in range(n)], tuple(torch.ones(i) for i in range(n))] for n in (40, 7)]
    assert all(same(*pair) for pair in zip(elements, round_trip(elements), strict=True))


def test_strided_conjugate_and_expanded_tensors_keep_their_values() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    odd = [base.permute(2, 0, 1), torch.ones(1).expand(5), torch.complex(base, base).conj(), base[:, ::2]]
    (back,) = round_trip([odd])
    assert all(torch.equal(*pair) for pair in zip(odd, back, strict=True))


def test_structured_arrays_and_parameters_are_stored() -> None:
    points = np.array([(1, 2.5, [1, 2])], dtype=[("a", "<i4"), ("b", "<f8"), ("c", "u1", (2,))])
    array, tensor = round_trip([(points, torch.nn.Parameter(torch.ones(2)))])[0]
    assert array.dtype == points.dtype and array.tobytes() == points.tobytes()
    assert type(tensor) is torch.Tensor and torch.equal(tensor, torch.ones(2))


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3).to_mkldnn(),
        torch.empty(2, device="meta"),
        object(),
        {1, 2},
        np.array([None]),
        {(1, 2): 3},
        "\ud800",
    ],
)
def test_what_fits_no_column_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(ElementError, match=r"element\['a'\]\[1\]: .* fits no column; allowed are .*allow_pickle"):
        encode_segment([(0, {"a": [1, value]})], allow_pickle=False)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, dtype=torch.complex32),
        lambda: np.zeros(2, np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [4, 0]})),
    ],
    ids=["complex32", "fields out of order"],
)
def test_a_dtype_that_cannot_be_told_is_refused_with_its_path(make: Any) -> None:
    value = make()
    with pytest.raises(ElementError, match=r"element\['x'\]: .* fits no column"):
        round_trip([{"x": value}])


def test_a_dtype_that_cannot_be_told_is_pickled_when_allowed() -> None:
    value = np.zeros(2, np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [4, 0]}))
    (back,) = round_trip([{"x": value}], allow_pickle=True)
    assert back["x"].dtype == value.dtype


def test_keys_that_are_equal_and_of_other_types_keep_their_types() -> None:
    elements: list[Any] = [{True: 1}, {1: 1}, {0: 2, "a": 3}, {False: 2, "a": 3}]
    back = round_trip(elements)
    assert [[type(key) for key in one] for one in back] == [[type(key) for key in one] for one in elements]


def test_what_fits_no_column_is_pickled_and_flagged_when_allowed() -> None:
    shard = encode_segment([(0, {"a": {1, 2}, "b": 1})], allow_pickle=True)
    assert shard.pickled_paths == ["element['a']"]
    assert decoded(shard, allow_pickle=True)[0] == {"a": {1, 2}, "b": 1}


def test_elements_without_any_common_form_are_refused_with_two_of_the_forms() -> None:
    elements = [(n, {f"key{n}": 1}) for n in range(80)]
    with pytest.raises(ElementError, match=r"element: elements have more than 64 different forms here.*key0.*key64"):
        encode_segment(elements, allow_pickle=False)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (5, 40), (64, 96), (0, 0)])
def test_every_lane_stands_in_file_order_with_its_elements_in_index_order(start: int, count: int) -> None:
    elements = [(index, torch.tensor(index)) for index in range(start, start + count)]
    shard = encode_segment(elements, allow_pickle=False)
    data = joined(shard)
    assert tuple(record.lane for record in shard.lanes) == LANES_IN_FILE_ORDER
    assert shard.lanes[0].offset == shard.schema_length
    schema = read_schema(bytes(data[: shard.schema_length]))
    for one, following in zip(shard.lanes, shard.lanes[1:], strict=False):
        assert one.offset + one.length == following.offset and one.offset % 8 == 0
    for record in shard.lanes:
        lane = read_lane(memoryview(data)[record.offset : record.offset + record.length], schema)
        indices = [index for index, _ in elements if lane_of(index) == record.lane]
        assert [lane.index(row) for row in range(len(lane))] == indices
        assert [int(lane[row_of(index, start=start)]) for index in indices] == indices


def test_the_object_is_an_arrow_stream_that_any_tool_reads() -> None:
    shard = encode_segment([(n, {"x": torch.full((2,), float(n)), "s": str(n)}) for n in range(64)], allow_pickle=False)
    table = pa.ipc.open_stream(joined(shard)).read_all()
    assert table.column_names == ["taas.index", "x", "s"]
    assert table.num_rows == 64
    assert sorted(table["x"].to_pylist()) == [[float(n)] * 2 for n in range(64)]


def test_checksums_sizes_and_digest_are_those_of_the_bytes() -> None:
    shard = encode_segment([(n, torch.ones(3) * n) for n in range(50)], allow_pickle=False)
    data = bytes(joined(shard))
    assert shard.num_bytes == len(data)
    assert shard.schema_crc32 == zlib.crc32(data[: shard.schema_length])
    lanes = [data[record.offset : record.offset + record.length] for record in shard.lanes]
    assert [zlib.crc32(lane) for lane in lanes] == [record.crc32 for record in shard.lanes]
    assert b"".join(lanes) == data[shard.schema_length : -8]


def test_the_digest_tells_values_types_and_lanes_apart() -> None:
    def digest(element: Any, *, first: int = 0) -> str:
        return encode_segment([(n + first, element(n)) for n in range(8)], allow_pickle=False).content_digest

    same = digest(lambda n: torch.full((4,), n))
    assert digest(lambda n: torch.full((4,), n)) == same
    others = [
        digest(lambda n: torch.full((4,), n + (n == 7))),
        digest(lambda n: torch.full((4,), n).to(torch.uint8)),
        digest(lambda n: torch.full((4,), n).view(torch.uint64)),  # the same bytes of another type
        digest(lambda n: torch.full((4,), n), first=8),
        digest(lambda n: torch.full((2, 2), n)),
    ]
    assert len({same, *others}) == 6


def test_encoding_copies_each_tensor_once() -> None:
    size = 1 << 20
    elements = [(n, torch.full((size,), n, dtype=torch.uint8)) for n in range(64)]
    shard = encode_segment(elements, allow_pickle=False)
    large = [part for part in shard.parts if part.nbytes >= 2 * size]
    assert [part.nbytes for part in large] == [2 * size] * 32  # the buffers themselves: no message holds them again
    assert shard.num_bytes < 64 * size + (1 << 16)


def test_the_same_elements_give_the_same_bytes() -> None:
    def encode() -> bytes:
        elements = [(n, {"x": torch.arange(n), "s": "a" * n, "v": None if n % 2 else 1.5}) for n in range(40)]
        return bytes(joined(encode_segment(elements, allow_pickle=False)))

    assert encode() == encode()
