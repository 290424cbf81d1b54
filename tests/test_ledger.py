from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas.errors import ObjectMissing
from taas_tasks import ledger
from taas_tasks.layout import RunKeys
from taas_tasks.ledger_reader import LedgerReader
from taas_tasks.plan import epochs_of_plan, segment_bounds, segments_in_order
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import Inspection, LoaderPlan, SegmentSizes, ShardRecord, Versions

KEYS = RunKeys("r")


def loader_plan(units: int, epoch_length: int | None = 100, *, lengths: tuple[int, ...] = ()) -> LoaderPlan:
    found = Inspection(
        loader="data",
        kind="map",
        order="recipe",
        epoch_length=epoch_length,
        epoch_lengths=list(lengths),
        claimed_length=None,
        num_loader_workers=0,
        batch_size=1,
        element_bytes=1,
        element_seconds=1,
        sampled_elements=1,
        versions=Versions(python="3.11"),
    )
    sizes = SegmentSizes(first=4, largest=16, machines=2)
    return LoaderPlan(loader="data", units=units, machines=2, inspection=found, sizes=sizes)


def record(
    plan: LoaderPlan, epoch: int, n: int, *, length: int, is_last_epoch: bool, seconds: float = 1.0
) -> ShardRecord:
    start, stop = segment_bounds(plan.sizes, n)
    is_last = stop >= length
    return ShardRecord(
        loader="data",
        epoch=epoch,
        stream=0,
        n=n,
        start=start,
        stop=min(stop, length),
        last_of_epoch=is_last,
        epoch_length=length if is_last else None,
        last_of_units=is_last and is_last_epoch,
        key=f"k{epoch}-{n}",
        num_bytes=1,
        schema_length=1,
        schema_crc32=0,
        lanes=[],
        content_digest="",
        machine=0,
        host="h",
        generation=1,
        started_at=0,
        committed_at=seconds,
        load_s=0,
        encode_s=0,
        upload_s=0,
    )


def records(plan: LoaderPlan) -> list[ShardRecord]:
    epochs = epochs_of_plan(plan)
    last = (epochs.num or 0) - 1
    return [
        record(plan, epoch, n, length=epochs.length_of(epoch) or 0, is_last_epoch=epoch == last)
        for epoch, n in segments_in_order(plan)
    ]


def put(store: MemoryStore, *found: ShardRecord) -> None:
    for one in found:
        store.put(KEYS.ledger_record("data", one.epoch, 0, one.n), one.to_bytes())


class CountingStore(MemoryStore):
    """Counts what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.missed = 0

    def get(self, key: str) -> bytes:
        self.asked.append(key)
        try:
            return super().get(key)
        except ObjectMissing:
            self.missed += 1
            raise


# --- folding --------------------------------------------------------------------------------------------------------


@given(units=st.integers(1, 400), missing=st.sets(st.integers(0, 60)), seed=st.integers(0, 100))
def test_the_watermark_counts_exactly_the_units_before_the_first_hole(units: int, missing: set[int], seed: int) -> None:
    plan = loader_plan(units)
    every = records(plan)
    there = [one for place, one in enumerate(every) if place not in missing]
    random.Random(seed).shuffle(there)
    frontier = ledger.fold(there)
    prefix = every[: min([place for place in missing if place < len(every)], default=len(every))]
    assert frontier.units == sum(one.stop - one.start for one in prefix)
    assert frontier.num_segments == len(prefix)
    assert frontier.complete == (len(prefix) == len(every))
    assert (frontier.units == units) == frontier.complete


def test_folding_goes_on_from_a_frontier() -> None:
    every = records(loader_plan(250))
    assert ledger.fold(every[9:], ledger.fold(every[:9])) == ledger.fold(every)


def test_a_record_out_of_turn_is_an_error() -> None:
    every = records(loader_plan(250))
    with pytest.raises(ValueError, match="next record is segment 0 of epoch 0, got segment 1"):
        ledger.after(ledger.Frontier(), every[1])


def test_following_segments_end_with_the_units_and_cross_epochs() -> None:
    plan = loader_plan(130)
    assert ledger.following(plan, ledger.Frontier(), 1000) == list(segments_in_order(plan))
    assert ledger.following(plan, ledger.fold(records(plan)), 5) == []


def test_following_segments_of_an_unknown_epoch_stay_in_it() -> None:
    assert ledger.following(loader_plan(130, None), ledger.Frontier(epoch=2, n=3), 2) == [(2, 3), (2, 4)]


def test_the_rate_is_that_of_the_slower_segments() -> None:
    plan = loader_plan(400)
    some = [record(plan, 0, n, length=999, is_last_epoch=False, seconds=1.0 + 3 * (n % 2)) for n in range(8)]
    rate = ledger.units_per_second(some, producers=2)
    assert rate is not None
    assert rate == pytest.approx(8.0)  # the quarter at the bottom ends at 4 units a second, times two machines
    assert ledger.units_per_second([], producers=2) is None


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_poll_with_nothing_new_costs_one_request() -> None:
    store = CountingStore()
    plan = loader_plan(250)
    put(store, *records(plan)[:5])
    reader = LedgerReader(store, "r", plan)
    assert [one.n for one in reader.poll()] == [0, 1, 2, 3, 4]
    store.asked.clear()
    assert reader.poll() == []
    assert len(store.asked) == 1


def test_polls_give_each_record_once_in_order_and_read_none_twice() -> None:
    store = CountingStore()
    plan = loader_plan(250)
    every = records(plan)
    reader = LedgerReader(store, "r", plan)
    found = []
    waiting = every.copy()
    random.Random(1).shuffle(waiting)
    while waiting:
        put(store, *waiting[:3])
        waiting = waiting[3:]
        found += reader.poll()
    assert found == every
    assert reader.watermark.complete
    assert reader.watermark.units == reader.watermark.asked == 250
    assert len(store.asked) - store.missed == len(every)
    assert reader.poll() == []


def test_epochs_of_unknown_length_are_found_by_their_last_record() -> None:
    plan = loader_plan(70, None)
    store = MemoryStore()
    first = [record(plan, 0, n, length=50, is_last_epoch=False) for n in range(6)]
    second = [record(plan, 1, n, length=20, is_last_epoch=True) for n in range(4)]
    first, second = [r for r in first if r.start < 50], [r for r in second if r.start < 20]
    put(store, *first, *second)
    reader = LedgerReader(store, "r", plan)
    assert reader.poll() == first + second
    assert reader.watermark.complete


def test_looking_ahead_tells_the_holes() -> None:
    plan = loader_plan(250)
    store = MemoryStore()
    every = records(plan)
    put(store, every[0], every[2], every[5])
    reader = LedgerReader(store, "r", plan)
    reader.poll()
    assert reader.look_ahead(5) == [(0, 1), (0, 3), (0, 4)]
    assert set(reader.ahead) == {(0, 0, 2), (0, 0, 5)}


def test_epochs_that_differ_are_followed() -> None:
    plan = loader_plan(60, None, lengths=(30, 20, 40))
    store = MemoryStore()
    put(store, *records(plan))
    reader = LedgerReader(store, "r", plan)
    assert reader.poll() == records(plan)
    assert reader.watermark.complete
