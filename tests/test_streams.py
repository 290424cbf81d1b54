"""The merge of streams against a plain simulation of it, and against torch's own DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from taas_tasks.plan import epochs_of
from taas_tasks.streams import Merge, MergedProgress, lane_period, lengths_of_streams, nominal_index

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def simulated(lengths: list[int]) -> list[tuple[int, int]]:
    return sorted(((p, s) for s, length in enumerate(lengths) for p in range(length)))


@given(LENGTHS)
def test_an_element_is_found_where_the_round_robin_without_ended_streams_puts_it(lengths: list[int]) -> None:
    merge = Merge(len(lengths), dict(enumerate(lengths)))
    order = [(stream, position) for position, stream in simulated(lengths)]
    assert merge.total == len(order)
    assert [merge.locate(index) for index in range(len(order))] == order
    assert [merge.index_of(*place) for place in order] == list(range(len(order)))
    with pytest.raises(IndexError):
        merge.locate(len(order))


@given(LENGTHS, st.data())
def test_what_is_known_of_some_streams_is_right_as_far_as_the_others_have_got(lengths: list[int], data: Any) -> None:
    progress = [data.draw(st.integers(0, length)) for length in lengths]
    told = {s for s in range(len(lengths)) if data.draw(st.booleans()) and progress[s] == lengths[s]}
    merge = Merge(len(lengths), {s: lengths[s] for s in told})
    order = [(stream, position) for position, stream in simulated(lengths)]
    there = next((i for i, (s, p) in enumerate(order) if p >= progress[s]), len(order))
    prefix = merge.prefix(progress)
    if len(told) == len(lengths):
        assert prefix == len(order)
    else:  # a stream whose end is not told may go on: nothing behind its progress is certain
        untold = min((progress[s], s) for s in range(len(lengths)) if s not in told)
        assert prefix == min(there, sum(one < untold for one in simulated(lengths)))
    assert [merge.locate(index) for index in range(prefix)] == order[:prefix]


@given(LENGTHS, st.integers(0, 60))
def test_the_elements_below_a_limit_are_counted_per_stream(lengths: list[int], limit: int) -> None:
    merge = Merge(len(lengths), dict(enumerate(lengths)))
    order = simulated(lengths)[:limit]
    for stream in range(len(lengths)):
        assert merge.count_below(stream, limit) == sum(s == stream for _, s in order)


@given(LENGTHS, st.sets(st.integers(0, 5)), st.integers(0, 12))
def test_the_index_counts_what_comes_before_whatever_is_known_of_the_ends(
    lengths: list[int], untold: set[int], position: int
) -> None:
    known = {stream: length for stream, length in enumerate(lengths) if stream not in untold}
    merge = Merge(len(lengths), known)
    for stream in range(len(lengths)):
        before = [min(known.get(one, position + 1), position + (one < stream)) for one in range(len(lengths))]
        assert merge.index_of(stream, position) == sum(before)


class Parts(IterableDataset[Any]):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return iter([(info.id, position) for position in range(self.lengths[info.id])])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("lengths", [[3, 0, 5], [1, 7, 2, 4], [0, 0, 3], [4, 4], [9]])
def test_the_order_is_that_of_torch(lengths: list[int]) -> None:
    loader = DataLoader(Parts(lengths), batch_size=None, num_workers=len(lengths))
    merge = Merge(len(lengths), dict(enumerate(lengths)))
    assert [tuple(one) for one in loader] == [merge.locate(index) for index in range(sum(lengths))]


@given(st.integers(1, 40), st.integers(0, 200))
def test_elements_dealt_out_one_by_one_keep_their_index(num_streams: int, length: int) -> None:
    merge = Merge(num_streams, lengths_of_streams(num_streams, length))
    assert merge.total == length
    for index in range(length):
        stream, position = merge.locate(index)
        assert nominal_index(position, stream, num_streams) == index


@pytest.mark.parametrize("num_streams", [1, 2, 3, 4, 6, 8, 12, 32, 33, 64])
def test_a_stream_comes_back_to_a_lane_after_its_period(num_streams: int) -> None:
    lanes = [nominal_index(position, 0, num_streams) % 32 for position in range(65)]
    assert lanes.index(lanes[0], 1) == lane_period(num_streams)


@settings(max_examples=300)
@given(st.lists(LENGTHS, min_size=1, max_size=3), st.integers(1, 40), st.data())
def test_streams_that_wait_for_what_is_certain_yield_exactly_the_units(
    epochs: list[list[int]], units: int, data: Any
) -> None:
    """Producers take turns at random, each making only what is certain to be needed: nothing is missing or too much."""
    num_streams = len(epochs[0])
    shapes = [(one * num_streams)[:num_streams] for one in epochs]
    shapes = [one if sum(one) else [1] * num_streams for one in shapes]
    merged = MergedProgress(num_streams=num_streams, units=units, epochs=epochs_of(units, None))
    whole: list[tuple[int, int, int]] = []
    for epoch in range(units):
        whole += [(epoch, p, s) for p, s in simulated(shapes[epoch % len(shapes)])]
    made: set[tuple[int, int, int]] = set()
    places = [0] * num_streams  # the epoch that each stream is in
    while not merged.is_complete:
        moves = []
        for stream, epoch in enumerate(places):
            n, start = merged.next_segment(epoch, stream)
            length, needed = shapes[epoch % len(shapes)][stream], merged.needed(epoch, stream)
            if merged.has_ended(epoch, stream):
                moves.append((stream, epoch, None))
            elif min(needed, length) > start or (needed > start and start == length):
                moves.append((stream, epoch, (n, start, min(needed, length, start + 3))))
        assert moves, "everybody waits"
        stream, epoch, work = data.draw(st.sampled_from(moves))
        if work is None:
            places[stream] += 1
            continue
        n, start, stop = work
        length = shapes[epoch % len(shapes)][stream]
        merged.add(epoch, stream, n, start=start, stop=stop, is_last=stop == length)
        made |= {(epoch, p, stream) for p in range(start, stop)}
    assert made == set(whole[:units])
    assert merged.units == units
    count = merged.num_epochs
    assert count == whole[units - 1][0] + 1
    assert sum(merged.epoch_length(epoch) or 0 for epoch in range(count)) == units


def test_a_segment_out_of_turn_is_refused() -> None:
    merged = MergedProgress(num_streams=2, units=9, epochs=epochs_of(9, None))
    merged.add(0, 1, 0, start=0, stop=2, is_last=False)
    with pytest.raises(ValueError, match="segment 1 from position 2 on comes next"):
        merged.add(0, 1, 2, start=2, stop=4, is_last=False)


@pytest.mark.parametrize(("stop", "is_last"), [(5, True), (3, True)])
def test_a_segment_that_contradicts_the_known_length_is_refused(stop: int, is_last: bool) -> None:
    merged = MergedProgress(num_streams=3, units=25, epochs=epochs_of(25, 10))
    with pytest.raises(ValueError, match=f"has 4 elements, got a segment from position 0 to {stop}"):
        merged.add(0, 0, 0, start=0, stop=stop, is_last=is_last)


def test_lengths_known_beforehand_are_certain_at_once() -> None:
    merged = MergedProgress(num_streams=3, units=25, epochs=epochs_of(25, 10))
    assert [merged.epoch_length(epoch) for epoch in range(3)] == [10, 10, 5]
    assert [[merged.needed(epoch, stream) for stream in range(3)] for epoch in range(4)] == [
        [4, 3, 3],
        [4, 3, 3],
        [2, 2, 1],
        [0, 0, 0],
    ]
    assert merged.num_epochs == 3
    assert merged.units == 0
