"""The gate's eyes: the ledger in a store, the decision written down when it opens."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from taas.request import parse_request
from taas_tasks.airflow.gate_watch import GateWatch
from taas_tasks.airflow.scope import Scope
from taas_tasks.airflow.triggers import GateTrigger
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import (
    GateDecision,
    Inspection,
    LoaderPlan,
    PinnedRequest,
    Plan,
    SegmentSizes,
    ShardRecord,
    Versions,
)
from tests.test_ledger import CountingStore
from tests.test_ledger_reader import stream_record

SCOPE = Scope("taas_train", "run-1", "gate", -1, "try-1")


def planned(*, start: object = 64) -> MemoryStore:
    store = MemoryStore()
    inspection = Inspection(
        loader="x", kind="map", order="recipe", epoch_length=128, claimed_length=128, num_loader_workers=0,
        batch_size=1, element_bytes=8, element_seconds=0.1, sampled_elements=2, versions=Versions(python="3.11"),
    )  # fmt: skip
    sizes = SegmentSizes(first=32, largest=32, machines=1)
    loader = LoaderPlan(loader="x", units=128, machines=1, inspection=inspection, sizes=sizes, source="d.py:x")
    plan = Plan(
        run=SCOPE.run, run_id="run-1", project="p", snapshot="s", loaders={"x": loader}, seed=0, randomness="element",
        remainder="pad", flavor="g2.8", nnodes=1, nproc_per_node=8, cpus=1,
    )  # fmt: skip
    conf = {"project": "p", "script": "t.py", "cpus": 1, "units": 128, "loaders": {"x": "d.py:x"}, "start": start}
    pinned = PinnedRequest(run_id="run-1", run=SCOPE.run, request=parse_request(conf), snapshot="s", base_record=0)
    store.put(SCOPE.keys.plan, plan.to_bytes())
    store.put(SCOPE.keys.request, pinned.to_bytes())
    return store


def commit(store: MemoryStore, n: int) -> None:
    record = ShardRecord(
        loader="x", epoch=0, stream=0, n=n, start=32 * n, stop=32 * n + 32, last_of_epoch=n == 3, last_of_units=n == 3,
        epoch_length=128 if n == 3 else None, key=f"k{n}", num_bytes=1, schema_length=1, schema_crc32=0, lanes=[],
        content_digest="d", machine=0, host="h", generation=1, started_at=n, committed_at=n + 1, load_s=0, encode_s=0,
        upload_s=0,
    )  # fmt: skip
    store.put(SCOPE.keys.ledger_record("x", 0, 0, n), record.to_bytes())


def test_gate_opens_when_the_contiguous_prefix_is_there_and_not_before():
    store = planned()
    watch = GateWatch.of_run(store, SCOPE.run)
    assert not watch.look().is_open
    commit(store, 1)
    assert not watch.look().is_open  # segment 0 is missing
    assert store.head(SCOPE.keys.gate) is None
    commit(store, 0)
    decision = watch.look()
    assert decision.is_open
    assert GateDecision.model_validate_json(store.get(SCOPE.keys.gate)) == decision


def test_gate_opens_for_a_prepared_loader_whose_record_was_lost():
    store = planned()
    watch = GateWatch.of_run(store, SCOPE.run)
    for n in (1, 2, 3):
        commit(store, n)
    assert not watch.look().is_open and not watch.look().is_open
    store.put(SCOPE.keys.prepared("x", 0), b"")
    assert not watch.look().is_open  # a record may have come between this look at the ledger and the mark
    decision = watch.look()
    assert decision.is_open
    assert (
        decision.reason
        == "x: prepared, but records of it are lost; the training's hosts have these segments made again"
    )


class Told(GateTrigger):
    """The trigger with a store, and with what Airflow would say, of a test's."""

    store: MemoryStore
    stopped = 0

    def open_watch(self) -> GateWatch:
        return GateWatch.of_run(self.store, self.scope.run)

    def num_stopped(self) -> int:
        return self.stopped


def event_of(store: MemoryStore, *, deadline: float, stopped: int = 0) -> dict[str, str]:
    trigger = Told(**dataclasses.asdict(SCOPE), deadline=deadline, stopped_by=["prepare"], stopped_by_states=["failed"])
    trigger.store, trigger.stopped = store, stopped

    async def first() -> dict[str, str]:
        async for event in trigger.run():
            return event.payload
        raise AssertionError("no event")

    return asyncio.run(asyncio.wait_for(first(), 20))


def test_trigger_fires_when_the_gate_opens():
    store = planned()
    commit(store, 0)
    commit(store, 1)
    event = event_of(store, deadline=time.time() + 60)
    assert event["status"] == "open" and "50 %" in event["reason"]


def test_trigger_gives_up_at_once_when_prepare_failed():
    event = event_of(planned(), deadline=time.time() + 60, stopped=1)
    assert event["status"] == "failed" and "prepare" in event["reason"]


def test_trigger_tells_the_way_out_of_a_garbage_record():
    store = planned()
    store.put(SCOPE.keys.ledger_record("x", 0, 0, 0), b"garbage")
    event = event_of(store, deadline=time.time() + 60)
    assert event["status"] == "failed" and "clear prepare and train" in event["reason"]


def test_a_watch_that_begins_late_reads_one_record_and_then_what_is_new():
    store, made = CountingStore(), planned(start="all")
    for key in (SCOPE.keys.plan, SCOPE.keys.request):
        store.put(key, made.get(key))
    for n in range(3):
        commit(store, n)
    watch = GateWatch.of_run(store, SCOPE.run)
    store.asked.clear()
    assert watch.look().reason == "x: 75 % there, starts at 100 %, in about 1 s"
    assert store.asked == [SCOPE.keys.ledger_record("x", 0, 0, n) for n in (2, 3)]
    commit(store, 3)
    assert watch.look().is_open


def merged(store: MemoryStore) -> None:
    """Make the planned loader one of three streams, of which machine 0 has two."""
    plan = Plan.model_validate_json(store.get(SCOPE.keys.plan))
    loader = plan.loaders["x"]
    found = {"read_by": "workers", "num_streams": 3, "order": "sequential", "epoch_length": None}
    inspection = loader.inspection.model_copy(update=found)
    changed = loader.model_copy(update={"inspection": inspection, "machines": 2})
    store.put(SCOPE.keys.plan, plan.model_copy(update={"loaders": {"x": changed}}).to_bytes())


def test_gate_of_a_merged_loader_opens_when_the_merged_prefix_is_there_and_not_before():
    store = planned(start=90)
    merged(store)
    watch = GateWatch.of_run(store, SCOPE.run)
    put_stream(store, 0, 0, (0, 32))
    put_stream(store, 0, 1, (32, 64))
    put_stream(store, 2, 0, (0, 32))
    assert not watch.look().is_open  # 96 elements are there, but only the first of the merged order
    put_stream(store, 1, 0, (0, 29))
    assert not watch.look().is_open
    put_stream(store, 1, 1, (29, 31))
    decision = watch.look()
    assert decision.is_open
    assert decision.watermarks[0].units == 31 * 3 + 1


def put_stream(store: MemoryStore, stream: int, n: int, bounds: tuple[int, int]) -> None:
    found = stream_record(0, stream, n, start=bounds[0], stop=bounds[1])
    key = SCOPE.keys.ledger_record("x", 0, stream, n)
    store.put(key, found.model_copy(update={"loader": "x"}).to_bytes())


def test_trigger_gives_up_after_the_deadline():
    assert event_of(planned(), deadline=0)["status"] == "failed"
