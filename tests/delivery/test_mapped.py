from __future__ import annotations

import os
import tempfile

import pytest

from taas.errors import DeliveryError
from taas_tasks.delivery.mapped import MappedPart
from taas_tasks.delivery.parts import Segment, describe_part, lay_out
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import SegmentSizes
from tests.delivery.support import MergedPrepared, ids

ALL = 2**32 - 1


def new_part(stream: int, *, lanes: int = ALL, told_stream: int | None = None) -> MappedPart:
    """Segment 1 of a stream of three, positions [16, 32), in a file of its own."""
    store, sizes = MemoryStore(), SegmentSizes(first=16, largest=16, machines=1)
    prepared = MergedPrepared(store, units=120, lengths=[[40, 40, 40]], sizes=sizes)
    record = prepared.commit(0, stream, 1)
    segment = Segment.of(record, num_streams=3)
    layout = lay_out(segment, lanes)
    data = store.get(record.key)
    with tempfile.TemporaryFile() as file:
        for span in layout.spans:
            os.pwrite(file.fileno(), data[span.start : span.start + span.length], span.place)
        told = describe_part(segment, lanes, layout) | ({} if told_stream is None else {"stream": told_stream})
        return MappedPart(told, os.dup(file.fileno()), num_streams=3, allow_pickle=False)


@pytest.mark.parametrize("apart", [1, 2, 3, 8])
def test_rows_are_the_elements_at_the_positions_up_to_the_parts_end(apart: int) -> None:
    part = new_part(1)
    found = ids(get(row) for get, row in part.rows(range(17, 40, apart)))
    assert found == [(0, 3 * position + 1) for position in range(17, 32, apart)]
    part.close()


def test_rows_end_before_a_lane_that_the_part_lacks() -> None:
    lacking = ALL & ~(1 << (20 * 3 + 2) % 32)
    part = new_part(2, lanes=lacking)
    assert part.holds(19) and not part.holds(20) and part.holds(21) and not part.holds(32)
    assert ids(get(row) for get, row in part.rows(range(16, 32))) == [(0, 3 * at + 2) for at in range(16, 20)]
    assert part.rows(range(20, 32)) == []
    part.close()


def test_only_lanes_that_are_read_are_mapped_and_counted() -> None:
    part = new_part(0)
    assert part.num_bytes == 0
    part.rows(range(16, 17))
    one = part.num_bytes
    part.rows(range(16, 18))
    assert 0 < one < part.num_bytes
    part.close()
    part.close()  # twice is fine


def test_an_element_that_is_not_where_the_record_says_is_never_delivered() -> None:
    part = new_part(1, told_stream=2)
    with pytest.raises(DeliveryError, match=r"segment 1 of epoch 0 \(stream 2\) has .* where element 50 should be"):
        part.rows(range(16, 32))
    part.close()
