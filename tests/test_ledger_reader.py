"""Reading ledgers of merged loaders: every record once, in its stream's order, for what is new."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas.errors import ObjectCorrupt, StoreUnavailable
from taas_tasks.layout import RunKeys
from taas_tasks.ledger_reader import LedgerReader
from taas_tasks.plan import epochs_of_plan, segment_bounds
from taas_tasks.store.memory import MemoryStore
from taas_tasks.streams import MergedProgress
from taas_tasks.values import LoaderPlan, SegmentSizes, ShardRecord
from tests.test_ledger import CountingStore, loader_plan, records

KEYS = RunKeys("r")
SIZES = SegmentSizes(first=1, largest=4, machines=1)


def merged_plan(units: int, num_streams: int, *, epoch_length: int | None = None) -> LoaderPlan:
    plan = loader_plan(units, epoch_length)
    found = {"read_by": "workers", "order": "sequential", "num_streams": num_streams, "epoch_length": epoch_length}
    inspection = plan.inspection.model_copy(update=found)
    return plan.model_copy(update={"inspection": inspection, "sizes": SIZES, "machines": min(2, num_streams)})


def stream_record(epoch: int, stream: int, n: int, *, start: int, stop: int, is_last: bool = False) -> ShardRecord:
    return ShardRecord(
        loader="data", epoch=epoch, stream=stream, n=n, start=start, stop=stop, last_of_epoch=is_last,
        epoch_length=stop if is_last else None, key=f"k{epoch}-{stream}-{n}", num_bytes=1, schema_length=1,
        schema_crc32=0, lanes=[], content_digest="", machine=0, host="h", generation=1, started_at=0, committed_at=1,
        load_s=0, encode_s=0, upload_s=0,
    )  # fmt: skip


def produced(plan: LoaderPlan, shapes: list[list[int]], rng: random.Random) -> Iterator[ShardRecord]:
    """Yield what the producers of streams of these lengths (epoch after epoch, cyclically) commit, in turns by chance.

    A producer makes only what is certain to be needed; so a segment may be smaller than its size says.
    """
    view = MergedProgress(num_streams=plan.num_streams, units=plan.units, epochs=epochs_of_plan(plan))
    places = [0] * plan.num_streams
    while not view.is_complete:
        stream = rng.randrange(plan.num_streams)
        epoch = places[stream]
        length = shapes[epoch % len(shapes)][stream]
        n, start = view.next_segment(epoch, stream)
        needed = view.needed(epoch, stream)
        if view.has_ended(epoch, stream):
            places[stream] += 1
        elif needed > start:
            low, high = segment_bounds(plan.sizes, n)
            stop = min(needed, length, start + rng.randint(1, high - low))
            view.add(epoch, stream, n, start=start, stop=stop, is_last=stop == length)
            yield stream_record(epoch, stream, n, start=start, stop=stop, is_last=stop == length)


def put(store: MemoryStore, one: ShardRecord) -> None:
    store.put(KEYS.ledger_record("data", one.epoch, one.stream, one.n), one.to_bytes())


SHAPES = st.integers(1, 5).flatmap(
    lambda num: st.lists(st.lists(st.integers(0, 12), min_size=num, max_size=num).filter(any), min_size=1, max_size=3)
)


@settings(max_examples=150, deadline=None)
@given(shapes=SHAPES, units=st.integers(1, 60), seed=st.integers(0, 1000), batch=st.integers(1, 12))
def test_records_in_any_order_are_each_gained_once_and_the_merge_is_right_at_every_poll(
    shapes: list[list[int]], units: int, seed: int, batch: int
) -> None:
    rng = random.Random(seed)
    plan = merged_plan(units, len(shapes[0]))
    store = CountingStore()
    every = list(produced(plan, shapes, rng))
    waiting = every.copy()
    rng.shuffle(waiting)
    reader = LedgerReader(store, "r", plan)
    gained: list[ShardRecord] = []
    while waiting:
        for one in waiting[:batch]:
            put(store, one)
        waiting = waiting[batch:]
        gained += reader.poll()
        assert reader.merged is not None
        assert reader.watermark.units == prefix_by_hand(plan.num_streams, units, gained)
    assert sorted(map(segment, gained)) == sorted(map(segment, every))
    for stream in range(plan.num_streams):
        own = [segment(one) for one in gained if one.stream == stream]
        assert own == sorted(own)
    assert reader.is_complete
    assert reader.watermark.complete
    assert (reader.watermark.units, reader.watermark.num_segments) == (units, len(every))
    assert len(store.asked) - store.missed == len(every)
    asked = len(store.asked)
    assert reader.poll() == []
    assert len(store.asked) == asked


def segment(record: ShardRecord) -> tuple[int, int, int]:
    return record.epoch, record.stream, record.n


def prefix_by_hand(num_streams: int, units: int, gained: list[ShardRecord]) -> int:
    """Go round and round over the streams, past those whose end is told, up to the first element that is missing."""
    there = {(one.epoch, one.stream, place) for one in gained for place in range(one.start, one.stop)}
    ends = {(one.epoch, one.stream): one.stop for one in gained if one.last_of_epoch}
    count = epoch = position = 0
    while count < units:
        alive = [stream for stream in range(num_streams) if ends.get((epoch, stream), position + 1) > position]
        if not alive:
            epoch, position = epoch + 1, 0
            continue
        for stream in alive:
            if count == units or (epoch, stream, position) not in there:
                return count
            count += 1
        position += 1
    return count


# --- what a poll costs ----------------------------------------------------------------------------------------------


def reader_of(store: MemoryStore, plan: LoaderPlan) -> LedgerReader:
    return LedgerReader(store, "r", plan)


def test_a_poll_with_nothing_new_asks_once_for_every_stream_that_may_go_on() -> None:
    store = CountingStore()
    plan = merged_plan(1000, 4)
    reader = reader_of(store, plan)
    put(store, stream_record(0, 2, 0, start=0, stop=1))
    assert [segment(one) for one in reader.poll()] == [(0, 2, 0)]
    store.asked.clear()
    assert reader.poll() == []
    assert sorted(store.asked) == [KEYS.ledger_record("data", 0, stream, int(stream == 2)) for stream in range(4)]


def test_one_new_record_costs_two_requests() -> None:
    store = CountingStore()
    reader = reader_of(store, merged_plan(1000, 2))
    put(store, stream_record(0, 0, 0, start=0, stop=1))
    reader.poll()
    put(store, stream_record(0, 0, 1, start=1, stop=2))
    store.asked.clear()
    assert [segment(one) for one in reader.poll()] == [(0, 0, 1)]
    assert sorted(store.asked) == [KEYS.ledger_record("data", 0, *place) for place in [(0, 1), (0, 2), (1, 0)]]


def test_streams_that_ended_or_have_all_that_is_certain_cost_no_request() -> None:
    store = CountingStore()
    reader = reader_of(store, merged_plan(9, 3))
    put(store, stream_record(0, 0, 0, start=0, stop=2, is_last=True))  # ended: the others have more of the 9 units
    put(store, stream_record(0, 1, 0, start=0, stop=4))  # units 0 to 8 hold 4 of it, if stream 2 does not end
    reader.poll()
    store.asked.clear()
    assert reader.poll() == []
    assert store.asked == [KEYS.ledger_record("data", 0, 2, 0)]


def test_an_early_end_makes_more_of_the_others_needed_in_the_same_poll() -> None:
    store = CountingStore()
    reader = reader_of(store, merged_plan(9, 3))
    put(store, stream_record(0, 0, 0, start=0, stop=2, is_last=True))
    put(store, stream_record(0, 1, 0, start=0, stop=4))
    reader.poll()
    put(store, stream_record(0, 1, 1, start=4, stop=6))
    put(store, stream_record(0, 2, 0, start=0, stop=1, is_last=True))
    assert {segment(one) for one in reader.poll()} == {(0, 2, 0), (0, 1, 1)}
    assert reader.is_complete


def test_catching_up_asks_hardly_more_than_there_is() -> None:
    store = CountingStore()
    plan = merged_plan(8000, 4, epoch_length=2000)
    every = list(produced(plan, [[500] * 4], random.Random(0)))
    for one in every:
        put(store, one)
    reader = reader_of(store, plan)
    assert len(reader.poll()) == len(every) > 1000
    assert reader.is_complete
    assert (
        store.missed <= 4 * 4 * 32
    )  # what is asked for too early is missed once, where an epoch's last segment is cut


def test_streams_of_known_length_are_read_ahead_into_the_next_epochs() -> None:
    store = CountingStore()
    reader = reader_of(store, merged_plan(8, 2, epoch_length=2))
    for epoch in range(4):
        put(store, stream_record(epoch, 1, 0, start=0, stop=1, is_last=True))
    assert [segment(one) for one in reader.poll()] == [(epoch, 1, 0) for epoch in range(4)]
    assert reader.watermark.units == 0
    assert reader.look_ahead(9, stream=0) == [(epoch, 0) for epoch in range(4)]
    put(store, stream_record(0, 0, 0, start=0, stop=1, is_last=True))
    put(store, stream_record(2, 0, 0, start=0, stop=1, is_last=True))
    assert reader.look_ahead(9, stream=0) == [(1, 0), (3, 0)]
    assert set(reader.ahead) == {(0, 0, 0), (2, 0, 0)}
    asked = len(store.asked)
    assert [segment(one) for one in reader.poll()] == [(0, 0, 0)]
    assert len(store.asked) == asked + 1
    assert reader.watermark.units == 2


def test_more_streams_than_an_epoch_has_elements_leave_some_without_any() -> None:
    store = CountingStore()
    plan = merged_plan(7, 5, epoch_length=3)
    for one in produced(plan, [[1, 1, 1, 0, 0]], random.Random(0)):
        put(store, one)
    reader = reader_of(store, plan)
    assert len(reader.poll()) == 7
    assert reader.is_complete
    assert store.missed == 0


def test_a_poll_for_enough_records_leaves_the_rest_to_the_next() -> None:
    store, plan = CountingStore(), loader_plan(1000)
    for one in records(plan):
        put(store, one)
    reader = reader_of(store, plan)
    gained = reader.poll(enough=10)
    assert 10 <= len(gained) < 20
    while more := reader.poll(enough=10):
        assert len(more) < 10 + 32
        gained += more
    assert gained == records(plan)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, units=st.integers(1, 60), seed=st.integers(0, 1000), data=st.data())
def test_catching_up_by_a_listing_comes_to_what_reading_every_record_comes_to(
    shapes: list[list[int]], units: int, seed: int, data: st.DataObject
) -> None:
    plan = merged_plan(units, len(shapes[0]))
    every = list(produced(plan, shapes, random.Random(seed)))
    early = [one for one in every if data.draw(st.integers(0, 4))]
    store = CountingStore()
    for one in early:
        put(store, one)
    reader, reading = reader_of(store, plan), reader_of(store, plan)
    store.asked.clear()
    read = reader.catch_up()
    assert len(store.asked) <= len({(one.epoch, one.stream) for one in early})
    assert {segment(one) for one in read} <= {segment(one) for one in early}
    reading.poll()
    assert reader.poll() == []
    assert reader.watermark == reading.watermark
    for one in every:
        put(store, one)
    assert sorted(map(segment, reader.poll())) == sorted(map(segment, reading.poll()))
    assert reader.watermark == reading.watermark
    assert reader.is_complete


@given(units=st.integers(1, 300), epoch_length=st.sampled_from([20, 100]), missing=st.sets(st.integers(0, 40)))
@settings(deadline=None)
def test_catching_up_with_one_stream_stops_at_its_first_hole(units: int, epoch_length: int, missing: set[int]) -> None:
    store, plan = CountingStore(), loader_plan(units, epoch_length)
    for place, one in enumerate(records(plan)):
        if place not in missing:
            put(store, one)
    reader, reading = reader_of(store, plan), reader_of(store, plan)
    reader.catch_up()
    reading.poll()
    assert reader.frontier == reading.frontier


def test_catching_up_with_a_long_ledger_costs_a_listing_and_one_record() -> None:
    store, plan = CountingStore(), loader_plan(20_000, 20_000)
    for one in records(plan):
        put(store, one)
    reader = reader_of(store, plan)
    [last] = reader.catch_up()
    assert last == records(plan)[-1]
    assert len(store.asked) == 1
    assert reader.watermark.complete
    assert reader.poll() == []


def test_objects_in_the_ledger_that_are_no_records_are_passed_over_by_a_listing() -> None:
    store, plan = MemoryStore(), loader_plan(30, 30)
    for one in records(plan):
        put(store, one)
    store.put(KEYS.ledger("data") + "notes.txt", b"hello")
    store.put(KEYS.ledger("data") + "000000/0000/old.json", b"{}")
    reader = reader_of(store, plan)
    reader.catch_up()
    assert reader.is_complete


def test_a_merged_loader_has_no_single_frontier() -> None:
    with pytest.raises(ValueError, match="has 2 streams"):
        _ = reader_of(MemoryStore(), merged_plan(9, 2)).frontier


def test_a_loader_that_is_not_merged_has_no_merge() -> None:
    store, plan = MemoryStore(), loader_plan(30, 30)
    for one in records(plan):
        put(store, one)
    reader = reader_of(store, plan)
    assert reader.merged is None
    assert not reader.is_complete
    reader.poll()
    assert reader.is_complete


# --- what goes wrong ------------------------------------------------------------------------------------------------


class Stuttering(MemoryStore):
    """Fails at one key as often as it is told."""

    def __init__(self, key: str, times: int) -> None:
        super().__init__()
        self.key, self.times = key, times

    def get(self, key: str) -> bytes:
        if key == self.key and self.times:
            self.times -= 1
            raise StoreUnavailable("503")
        return super().get(key)


def test_records_gained_before_the_store_failed_come_with_the_next_poll() -> None:
    plan = loader_plan(250)
    store = Stuttering(KEYS.ledger_record("data", 0, 0, 5), times=1)
    for one in records(plan):
        put(store, one)
    reader = reader_of(store, plan)
    with pytest.raises(StoreUnavailable):
        reader.poll()
    assert reader.poll() == records(plan)


OTHER = stream_record(0, 0, 1, start=4, stop=8)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "Invalid JSON"),
        (b"\xff\x00", "Invalid JSON"),
        (b"[1, 2]", "Input should be an object"),
        (b'{"version": 1}', "loader: Field required"),
        (OTHER.to_bytes().replace(b'"version":1', b'"version":7'), "version: Input should be 1"),
        (OTHER.to_bytes(), "another segment, 'ledger/data/000000/0000/00000001.json'"),
        (OTHER.model_copy(update={"loader": "more", "n": 0}).to_bytes(), "another segment, 'ledger/more/"),
        (OTHER.model_copy(update={"n": 0}).to_bytes(), "does not follow: .* its start is 0, got 4"),
    ],
)
def test_a_garbage_record_is_an_error_with_its_key_and_the_way_out(data: bytes, found: str) -> None:
    store = MemoryStore()
    key = KEYS.ledger_record("data", 0, 0, 0)
    store.put(key, data)
    with pytest.raises(ObjectCorrupt, match=f"{found}.*Remove that object, then clear prepare and train") as caught:
        reader_of(store, loader_plan(250)).poll()
    assert caught.value.fields["key"] == key
    assert key in caught.value.message


def test_a_stream_with_a_gap_in_its_positions_is_an_error_that_names_the_record() -> None:
    store = MemoryStore()
    put(store, stream_record(0, 1, 0, start=0, stop=3))
    put(store, stream_record(0, 1, 1, start=4, stop=5))
    with pytest.raises(ObjectCorrupt, match=r"0001/00000001\.json.*segment 1 from position 3 on comes next"):
        reader_of(store, merged_plan(100, 2)).poll()
