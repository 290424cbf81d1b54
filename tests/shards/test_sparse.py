"""Sparse tensors lie in columns as their parts, and come back as they were."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from taas_tasks.shards.reader import read_lane, read_schema
from taas_tasks.shards.writer import encode_segment
from tests.prep.oracle import equal

LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]


def round_trip(elements: list[Any]) -> list[Any]:
    shard = encode_segment(enumerate(elements), allow_pickle=False)
    data = bytearray(b"".join(shard.parts))
    schema = read_schema(bytes(data[: shard.schema_length]))
    found = {}
    for record in shard.lanes:
        lane = read_lane(memoryview(data)[record.offset : record.offset + record.length], schema, crc32=record.crc32)
        found.update({lane.index(row): lane[row] for row in range(len(lane))})
    return [found[index] for index in sorted(found)]


def tensor(layout: torch.layout, rows: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randint(-1, 2, (2 * rows, 4), generator=generator).to(dtype)
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return dense.to_sparse(layout=layout, **blocks)


@settings(deadline=None, max_examples=60)
@given(
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=4),
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int64, torch.complex64]),
)
def test_sparse_tensors_of_any_layout_come_back_bit_for_bit(
    layouts: list[torch.layout], rows: list[int], dtype: torch.dtype
) -> None:
    elements = [[tensor(layout, count, at, dtype) for layout in layouts] for at, count in enumerate(rows)]
    assert all(equal(*pair) for pair in zip(round_trip(elements), elements, strict=True))


def test_what_is_not_coalesced_stays_so_and_empty_ones_and_dense_dimensions_are_kept() -> None:
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=True)
    empty = torch.zeros(2, 3).to_sparse()
    hybrid = torch.sparse_coo_tensor([[2, 0]], [[1.0, 2.0], [3.0, 4.0]], (3, 2), check_invariants=True)
    (back,) = round_trip([{"twice": twice, "empty": empty, "hybrid": hybrid}])
    assert equal(back, {"twice": twice, "empty": empty, "hybrid": hybrid})
    assert not back["twice"].is_coalesced() and torch.equal(back["twice"].to_dense(), torch.tensor([0.0, 3.0, 0.0]))


def test_dense_and_sparse_elements_in_one_segment_come_back_as_they_were() -> None:
    elements = [torch.eye(2), torch.eye(2).to_sparse(), torch.eye(3).to_sparse_csr()]
    assert all(equal(*pair) for pair in zip(round_trip(elements), elements, strict=True))
