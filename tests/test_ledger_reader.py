"""Reading ledgers of merged loaders: every record once, in its stream's order, for what is new."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas.errors import ObjectCorrupt, ObjectMissing, StoreUnavailable
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
