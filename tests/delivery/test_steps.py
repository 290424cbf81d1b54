"""Which element a rank takes where, in merged loaders too, against a plain simulation."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from taas_tasks.delivery.parts import Ranks, lanes_of
from taas_tasks.delivery.steps import Ending, alive_at, ending_of, next_position, place_of
from taas_tasks.streams import Merge, nominal_index

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)
WORLD = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32])


def simulated(lengths: list[int]) -> list[tuple[int, int]]:
    """The epoch's order, as (stream, position)."""
    return [(s, p) for p, s in sorted((p, s) for s, length in enumerate(lengths) for p in range(length))]


@settings(max_examples=50)
@given(LENGTHS, WORLD, st.integers(0, 50), st.data())
def test_a_host_needs_the_lanes_of_its_ranks_elements_of_a_segment_and_no_other(
    lengths: list[int], world: int, offset: int, data: Any
) -> None:
    count = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if world % n == 0]))
    ranks = Ranks(data.draw(st.integers(0, world // count - 1)) * count, count, world)
    merge, order = Merge(len(lengths), dict(enumerate(lengths))), simulated(lengths)
    for stream, length in enumerate(lengths):
        start = data.draw(st.integers(0, length))
        stop = data.draw(st.integers(start, length))
        expected = {
            nominal_index(position, stream, len(lengths)) % 32
            for index, (one, position) in enumerate(order)
            if one == stream and start <= position < stop and 0 <= (index - offset) % world - ranks.first < count
        }
        assert set(lanes_of(ranks.merged_lanes(merge, stream, start=start, stop=stop, offset=offset))) == expected


@settings(max_examples=50)
@given(LENGTHS, WORLD, st.integers(0, 50), st.integers(0, 31), st.data())
def test_the_next_position_of_a_rank_in_a_stream_is_found(
    lengths: list[int], world: int, offset: int, rank: int, data: Any
) -> None:
    first, order = offset + rank % world, simulated(lengths)
    merge = Merge(len(lengths), dict(enumerate(lengths)))
    below = data.draw(st.none() | st.integers(0, len(order)))
    for stream in range(len(lengths)):
        position = data.draw(st.integers(0, 41))
        own = [
            at
            for index, (one, at) in enumerate(order[:below])
            if one == stream and at >= position and index >= first and (index - first) % world == 0
        ]
        found = next_position(merge, stream, first=first, world_size=world, position=position, below=below)
        assert found == min(own, default=None)


@given(LENGTHS, st.integers(0, 60), st.integers(0, 40))
def test_padding_of_a_merged_epoch_is_read_from_its_start_by_the_same_rank(
    lengths: list[int], offset: int, beyond: int
) -> None:
    order, merge = simulated(lengths), Merge(len(lengths), dict(enumerate(lengths)))
    ending = Ending(len(order), len(order), dict(enumerate(lengths)))
    for index in (len(order) - 1, len(order) + beyond):
        place = place_of(index, offset=offset, ending=ending, merge=merge)
        assert (place.stream, place.position) == order[index % len(order)]
        assert index % len(order) - place.offset == index - offset


@given(LENGTHS)
def test_streams_that_yield_at_an_index_are_counted_up_to_the_next_end(lengths: list[int]) -> None:
    merge, order = Merge(len(lengths), dict(enumerate(lengths))), simulated(lengths)
    index = 0
    while index < len(order):
        alive, end = alive_at(merge, index)
        stop = len(order) if end is None else end
        assert index < stop
        assert {one for one, _ in order[index:stop]} <= {order[index + place][0] for place in range(alive)}
        index = stop


def test_an_epoch_whose_length_is_known_ends_with_even_streams_or_with_padding() -> None:
    assert ending_of(11, num_streams=4, is_merged=True) == Ending(11, 11, {0: 3, 1: 3, 2: 3, 3: 2})
    assert ending_of(11, num_streams=1, is_merged=False) == Ending(11, 32)
