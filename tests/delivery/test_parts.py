from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas_tasks.delivery.parts import Ranks, Segment, lanes_of, lay_out
from taas_tasks.delivery.steps import Ending, epochs_with_steps, num_steps, place_of
from taas_tasks.plan import epochs_of
from taas_tasks.store.memory import MemoryStore
from taas_tasks.streams import Merge
from taas_tasks.values import SegmentSizes
from tests.delivery.support import MergedPrepared, Prepared


def segment(length: int = 64) -> Segment:
    prepared = Prepared(MemoryStore(), units=length, length=length)
    return Segment.of(prepared.commit(*prepared.segments()[-1]))


@pytest.mark.parametrize(
    ("nnodes", "nproc", "offset", "ranges"),
    [(1, 8, 0, 1), (2, 8, 0, 1), (4, 8, 0, 1), (1, 8, 5, 1), (2, 8, 8, 1), (4, 8, 8, 1), (4, 8, 3, 2)],
)
def test_a_hosts_lanes_are_one_range_of_the_file_or_two_after_a_resume(
    nnodes: int, nproc: int, offset: int, ranges: int
) -> None:
    one = segment()
    for node in range(nnodes):
        bits = Ranks(node * nproc, nproc, nnodes * nproc).lanes(offset)
        spans = lay_out(one, bits, bridge_bytes=0).spans
        behind_schema = [span for span in spans if span.start + span.length > one.schema_length]
        assert len(behind_schema) <= ranges


COUNTS = st.integers(0, 100)


@given(world=st.integers(1, 40), offset=COUNTS, rank=st.integers(0, 39), step=COUNTS, nproc=st.integers(1, 8))
def test_every_element_of_a_rank_lies_in_a_lane_of_its_host(
    world: int, offset: int, rank: int, step: int, nproc: int
) -> None:
    rank %= world
    first = rank // nproc * nproc
    bits = Ranks(first, min(nproc, world - first), world).lanes(offset)
    assert (offset + step * world + rank) % 32 in lanes_of(bits)


def test_the_layout_holds_the_schema_and_every_lane_once_at_aligned_places() -> None:
    one = segment()
    layout = lay_out(one, 0b1001_0000_0000_0000_0110)
    assert [lane for lane, _, _ in layout.lanes] == [1, 2, 16, 19]
    assert layout.spans[0].start == layout.spans[0].place == 0
    lengths = {one.lane: one.length for one in one.lanes(2**32 - 1)}
    assert all(place % 8 == 0 and length == lengths[lane] for lane, place, length in layout.lanes)
    assert layout.num_bytes < sum(lengths.values())


@pytest.mark.parametrize("num_streams", [1, 2, 4, 8])
def test_a_stream_is_one_range_of_the_file_to_a_host_though_its_lanes_are_apart(num_streams: int) -> None:
    lengths = [64] * num_streams
    sizes = SegmentSizes(first=64, largest=64, machines=1)
    prepared = MergedPrepared(MemoryStore(), units=sum(lengths), lengths=[lengths], sizes=sizes, width=20_000)
    for stream in range(num_streams):
        one = Segment.of(prepared.commit(0, stream, 0), num_streams=num_streams)
        for node in range(2):
            bits = Ranks(node * 8, 8, 16).merged_lanes(Merge(num_streams), stream, start=0, stop=64, offset=0)
            layout = lay_out(one, bits)
            assert len([span for span in layout.spans if span.start + span.length > one.schema_length]) == 1
            wanted = sum(lane.length for lane in one.lanes(bits))
            assert wanted <= layout.num_bytes - one.schema_length < wanted + (1 << 16)


def test_a_segment_counts_the_real_elements_of_some_lanes() -> None:
    one = segment(50)  # its last segment holds elements 28..49 and padding
    assert (one.start, one.stop, one.padded_stop) == (28, 50, 64)
    assert one.num_elements(2**32 - 1) == 22
    assert one.num_elements(1 << 28) == 1 and one.num_elements(1 << 20) == 0


@given(length=st.integers(1, 200), offset=st.integers(0, 200), world=st.integers(1, 40), drop=st.booleans())
def test_steps_cover_all_elements_or_all_whole_steps(length: int, offset: int, world: int, drop: bool) -> None:
    offset = min(offset, length)
    steps = num_steps(length, offset=offset, world_size=world, remainder="drop" if drop else "pad")
    taken = range(offset, offset + steps * world)
    if drop:
        assert taken.stop <= length < taken.stop + world
    else:
        assert taken.stop - world < length <= taken.stop or steps == 0


@given(length=st.integers(1, 100), offset=st.integers(0, 99), beyond=st.integers(0, 80))
def test_padding_beyond_the_shards_is_read_from_the_epochs_start(length: int, offset: int, beyond: int) -> None:
    padded = length + -length % 32
    ending, merge = Ending(length, padded), Merge(1)
    place = place_of(padded + beyond, offset=offset, ending=ending, merge=merge)
    assert 0 <= place.position < length and place.position == (padded + beyond) % length
    assert padded + beyond - offset == place.position - place.offset  # the same rank takes it
    assert place_of(padded - 1, offset=offset, ending=ending, merge=merge).position == padded - 1


def test_a_last_epoch_without_a_whole_step_is_no_pass_when_dropping() -> None:
    epochs = epochs_of(23, 10)
    assert epochs_with_steps(epochs, world_size=4, remainder="drop") == 2
    assert epochs_with_steps(epochs, world_size=4, remainder="pad") == 3
    assert epochs_with_steps(epochs_of(23, None), world_size=4, remainder="drop") is None
