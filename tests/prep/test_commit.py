from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from taas.errors import ObjectCorrupt
from taas_tasks.layout import RunKeys
from taas_tasks.prep.commit import Committed, Producer, Segment, Times, commit, put_object, record_of
from taas_tasks.shards.writer import encode_segment
from taas_tasks.store.base import ObjectStore
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import ShardRecord

SEGMENT = Segment(epoch=1, n=2, start=32, stop=40, padding=(0, 1), last_of_epoch=True)


def producer(machine: int = 0, generation: int = 1) -> Producer:
    return Producer("run", "data", machine, f"host-{machine}", generation)


def attempt(store: ObjectStore, who: Producer, *, values: int = 0) -> ShardRecord:
    """Write the segment's object; return the record that is not put yet."""
    shard = encode_segment(((index, torch.tensor([index, values])) for index in range(32, 42)), allow_pickle=False)
    key = put_object(store, who, SEGMENT, shard)
    return record_of(who, SEGMENT, shard, key=key, times=Times(1.0, 2.0, 3.0), upload_s=4.0, committed_at=9.0)


def ledger_of(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list(RunKeys("run").ledger("data"))]


def shards_of(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list("runs/run/shards/")]


def test_the_first_record_wins_and_says_all(memory_store: MemoryStore) -> None:
    record = attempt(memory_store, producer())
    assert commit(memory_store, record, run="run") == Committed(record, won=True, differs=False)
    (key,) = ledger_of(memory_store)
    assert ShardRecord.model_validate_json(memory_store.get(key)) == record
    assert (record.epoch, record.n, record.start, record.stop, record.num_padding) == (1, 2, 32, 40, 2)
    assert (record.last_of_epoch, record.epoch_length, record.last_of_units) == (True, 40, False)
    assert memory_store.head(record.key) is not None
    assert memory_store.head(record.key).num_bytes == record.num_bytes
    assert (record.started_at, record.load_s, record.encode_s, record.upload_s) == (1.0, 2.0, 3.0, 4.0)


def test_the_loser_deletes_its_own_object_and_only_that(memory_store: MemoryStore) -> None:
    first, second = attempt(memory_store, producer(0)), attempt(memory_store, producer(1))
    commit(memory_store, first, run="run")
    lost = commit(memory_store, second, run="run")
    assert lost == Committed(first, won=False, differs=False)
    assert shards_of(memory_store) == [first.key]


def test_a_lost_reply_is_a_won_race(memory_store: MemoryStore) -> None:
    record = attempt(memory_store, producer())
    commit(memory_store, record, run="run")
    again = commit(memory_store, record, run="run")
    assert again.won
    assert shards_of(memory_store) == [record.key]


def test_a_retry_of_the_same_machine_has_a_key_of_its_own(memory_store: MemoryStore) -> None:
    first, second = attempt(memory_store, producer(generation=1)), attempt(memory_store, producer(generation=2))
    assert first.key != second.key
    assert commit(memory_store, second, run="run").won
    assert not commit(memory_store, first, run="run").won
    assert shards_of(memory_store) == [second.key]


def test_a_result_that_differs_is_told_and_the_first_is_kept(
    memory_store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = attempt(memory_store, producer(0)), attempt(memory_store, producer(1), values=1)
    commit(memory_store, first, run="run")
    with caplog.at_level(logging.WARNING):
        lost = commit(memory_store, second, run="run")
    assert lost.differs
    assert lost.record == first
    assert "loader 'data' is not deterministic: segment 2 of epoch 1 (elements 32 to 39)" in caplog.text
    assert "host-0 (machine 0, try 1) and by host-1 (machine 1, try 1)" in caplog.text


@pytest.mark.store
def test_of_machines_that_race_on_a_real_store_one_wins_and_no_object_is_lost(s3_store: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    records = [attempt(s3_store, producer(machine)) for machine in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda record: commit(s3_store, record, run="run"), records))
    winners = [one for one in found if one.won]
    assert len(winners) == 1
    assert all(one.record == winners[0].record for one in found)
    assert shards_of(s3_store) == [winners[0].record.key]


def test_a_record_that_is_garbage_is_an_error_and_the_own_object_stays(memory_store: MemoryStore) -> None:
    record = attempt(memory_store, producer())
    key = RunKeys("run").ledger_record("data", 1, 0, 2)
    memory_store.put(key, b"garbage")
    with pytest.raises(ObjectCorrupt, match="Remove that object, then clear prepare and train"):
        commit(memory_store, record, run="run")
    assert shards_of(memory_store) == [record.key]
