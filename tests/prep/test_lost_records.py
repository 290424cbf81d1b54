from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from taas.errors import PrepareError
from taas_tasks.layout import RunKeys
from taas_tasks.prep import prepare_program
from taas_tasks.prep.lost_records import LostRecord, find_lost
from taas_tasks.prep.work import Pace
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import Plan
from tests.faults.conftest import MakeScene, make_scene, process_as_before
from tests.faults.scene import RUN as SCENE_RUN
from tests.faults.scene import TWO_STREAMS
from tests.prep import cases, oracle, stream_cases

__all__ = ["make_scene", "process_as_before"]
KEYS = RunKeys(cases.RUN)
IMPATIENT = Pace(refresh_s=0.05, poll_s=0.01, lost_s=0.2)
UNITS = 24


def make() -> DataLoader[Any]:
    return DataLoader(cases.Numbers(20), batch_size=None, num_workers=2)


def shared(store: MemoryStore) -> Plan:
    return cases.plan_of(store, make, units=UNITS, machines=2, sizes={"first": 2, "largest": 4})


def all_committed() -> tuple[MemoryStore, Plan]:
    store = MemoryStore()
    plan = shared(store)
    stream_cases.prepare_in_turns(store, make, plan)
    return store, plan


def of_first_stream(epoch: int, n: int) -> str:
    return KEYS.ledger_record("data", epoch, 0, n)


def lost(store: MemoryStore, plan: Plan, *awaited: tuple[int, int, int]) -> list[LostRecord]:
    return find_lost(awaited, store=store, run=cases.RUN, plan=cases.loader_plan_of(plan))


def test_a_record_is_lost_when_later_ones_of_its_stream_are_there_or_its_owner_saw_all() -> None:
    store, plan = all_committed()
    keys = [info.key for info in store.list(f"{KEYS.ledger('data')}") if "/0000/" in info.key.split("data/")[1][6:]]
    last = keys[-1]
    epoch, n = int(last.split("/")[-3]), int(last.split("/")[-1].removesuffix(".json"))
    store.delete(of_first_stream(0, 1))
    store.delete(last)
    (one,) = lost(store, plan, (0, 0, 1), (epoch, 0, n), (0, 1, 0))  # the last one may come late, the third is there
    assert (one.epoch, one.stream, one.n, one.why) == (0, 0, 1, "later ones of its stream are there")
    store.put(KEYS.prepared("data", 1), b"")
    assert len(lost(store, plan, (epoch, 0, n))) == 0
    store.put(KEYS.prepared("data", 0), b"")
    (one,) = lost(store, plan, (epoch, 0, n))
    assert one.why == "machine 0, which prepared it, saw the loader complete"


def test_a_machine_that_waits_for_a_lost_record_ends_with_a_sentence_where_nobody_makes_it_again() -> None:
    store, plan = all_committed()
    store.delete(of_first_stream(0, 1))
    with pytest.raises(PrepareError) as caught:
        cases.prepare(store, make, plan, machine=1, generation=99, pace=IMPATIENT)
    assert "segment 1 of stream 0 in epoch 0 of loader 'data' is committed, but its ledger record is gone" in (
        caught.value.message
    )
    assert "machine 1 needs it, has waited 0 s" in caught.value.message
    assert "Clear this task: it has the segment prepared again" in caught.value.message
    fields = {name: caught.value.fields[name] for name in ("loader", "epoch", "stream", "n")}
    assert fields == {"loader": "data", "epoch": 0, "stream": 0, "n": 1}


def test_a_machine_that_waits_for_a_lost_record_goes_on_when_it_is_made_again() -> None:
    store, plan = all_committed()
    kept = store.get(of_first_stream(0, 1))
    store.delete(of_first_stream(0, 1))
    asked: list[LostRecord] = []

    def again(one: LostRecord) -> None:
        asked.append(one)
        store.put(of_first_stream(one.epoch, one.n), kept)

    cases.prepare(store, make, plan, machine=1, generation=99, pace=IMPATIENT, make_again=again)
    assert [(one.epoch, one.stream, one.n) for one in asked] == [(0, 0, 1)]


def test_a_record_that_is_lost_again_at_once_is_given_up() -> None:
    store, plan = all_committed()
    store.delete(of_first_stream(0, 1))
    with pytest.raises(PrepareError, match="it was prepared again, and lost again"):
        cases.prepare(store, make, plan, machine=1, generation=99, pace=IMPATIENT, make_again=lambda _: None)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def test_a_machine_that_waits_puts_its_own_last_record_again() -> None:
    """Machine 1 has begun nothing yet; what machine 0 has read is all that is certain to be needed."""
    store = MemoryStore()
    plan = shared(store)
    failed: list[BaseException] = []

    def prepare(machine: int) -> None:
        try:
            cases.prepare(store, make, plan, machine=machine, pace=IMPATIENT)
        except BaseException as error:  # noqa: BLE001 (told by the test)
            failed.append(error)

    first = threading.Thread(target=prepare, args=(0,))
    first.start()
    try:
        last = of_first_stream(0, 2)  # [6, 10): the end of what it has in this epoch
        wait_until(lambda: bool(failed) or store.head(last) is not None, "the stream does not end")
        kept = store.get(last)
        time.sleep(0.3)  # the owner has seen it
        store.delete(last)
        wait_until(lambda: bool(failed) or store.head(last) is not None, "the record is not put again")
        assert store.get(last) == kept
    finally:
        second = threading.Thread(target=prepare, args=(1,))
        second.start()
        first.join(60)
        second.join(60)
    assert not failed
    stored = oracle.committed_stream(store, cases.RUN, "data")
    oracle.assert_same_stream(stored.stream, oracle.local_stream(make(), seed=0, units=UNITS))


SHARED = """
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

class Parts(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id, 60, info.num_workers):
            yield {"at": index, "x": torch.randn(64)}

def make_loader():
    return DataLoader(Parts(), batch_size=None, num_workers=2)
"""


@pytest.mark.store
def test_the_program_of_another_machine_has_a_lost_segment_prepared_again_as_it_was(
    make_scene: MakeScene, tmp_path: Path
) -> None:
    scene = make_scene(source=SHARED, inspection=TWO_STREAMS, units=80)
    scene.prepare()  # both streams, by one machine
    two = scene.loader_plan.model_copy(update={"machines": 2})
    keys = RunKeys(SCENE_RUN)
    scene.near.put(keys.plan, scene.plan.model_copy(update={"loaders": {"data": two}}).to_bytes())
    records = scene.records()
    gone = next(one for one in records if (one.epoch, one.stream, one.n) == (0, 0, 1))
    scene.near.delete(scene.record_key(gone))
    given = prepare_program.PrepareInput.model_validate({**scene.prepare_input(generation=7), "machine": 1})
    result = prepare_program.run(given, scene.near, scene.folder / "project", pace=IMPATIENT)
    assert result["committed"] == 0
    same = ("epoch", "stream", "n", "start", "stop", "last_of_epoch", "content_digest")
    assert [one.model_dump(include=set(same)) for one in scene.records()] == [
        one.model_dump(include=set(same)) for one in records
    ]
    (made,) = [one for one in scene.records() if (one.epoch, one.stream, one.n) == (0, 0, 1)]
    assert made.generation == 1000 * (100 + 1 + 1) + 7
    assert scene.near.head(made.key) is not None
