"""Preparing one committed segment again, on the host that lacks it: ``python -m taas_tasks.prep.repair_program INPUT``.

The feeder starts it when a segment's object, or its ledger record, is gone or wrong. The elements are made by the same
code as in the first place. A record that is there is kept, as hosts have read it: what is made must have its checksums,
and takes the place of its object. A segment without a record is committed as usual.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from taas.errors import DeliveryError, ObjectMissing
from taas_tasks.launch.processes import die_with_parent
from taas_tasks.layout import RunKeys
from taas_tasks.ledger import read_record
from taas_tasks.plan import epochs_of_plan
from taas_tasks.prep.commit import Producer, Segment, Times, commit, put_object, record_of
from taas_tasks.prep.elements import Failure, Task, loader_of_tasks, owned
from taas_tasks.prep.failures import raised_at
from taas_tasks.prep.opening import open_loader
from taas_tasks.prep.order import Order
from taas_tasks.prep.pipeline import LoadedSegment
from taas_tasks.prep.prepare_program import order_of
from taas_tasks.prep.program import ProgramInput, leave, run_program
from taas_tasks.prep.work import segment_at
from taas_tasks.project import materialise
from taas_tasks.shards.writer import EncodedShard, encode_segment
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LoaderPlan, ShardRecord

_log = logging.getLogger(__name__)


class RepairInput(ProgramInput):
    """Which segment to prepare again. ``machine``: under which number one without a record is committed."""

    loader_plan: LoaderPlan
    seed: int
    randomness: Literal["element", "exact"]
    allow_pickle: bool
    epoch: int
    stream: int
    n: int
    machine: int


def run(given: RepairInput, store: ObjectStore, folder: Path) -> dict[str, Any]:
    """Prepare the segment again and put it where it belongs; return its key. ``folder`` becomes the project's folder.

    Raises:
        DeliveryError: what is made now is not what was committed.
        PrepareError: the elements cannot be made.
    """
    materialise(store, given.project, given.snapshot, folder)
    torch.set_num_threads(1)  # the ranks of this host have the other cores
    record = _record(given, store)
    loaded = _made_again(given, store, folder)
    began = time.perf_counter()
    shard = encode_segment(_indexed(given, loaded), allow_pickle=given.allow_pickle)
    if record is None:
        times = Times(loaded.started_at, loaded.load_s, time.perf_counter() - began)
        return {"key": _commit(given, store, loaded.segment, shard, times).key}
    _refuse_difference(given, record, shard)
    store.put(record.key, b"".join(shard.parts))
    return {"key": record.key}


def _record(given: RepairInput, store: ObjectStore) -> ShardRecord | None:
    key = RunKeys(given.run).ledger_record(given.loader_plan.loader, given.epoch, given.stream, given.n)
    try:
        return read_record(store.get(key), key)
    except ObjectMissing:
        return None


def _producer(given: RepairInput) -> Producer:
    return Producer(given.run, given.loader_plan.loader, given.machine, given.host, given.generation)


def _made_again(given: RepairInput, store: ObjectStore, folder: Path) -> LoadedSegment:
    plan = given.loader_plan
    loader = open_loader(plan, folder, store)
    segment = segment_at(plan, epochs_of_plan(plan), (given.epoch, given.n))
    order = order_of(loader, plan, store=store, run=given.run, seed=given.seed)
    started_at, began = time.time(), time.perf_counter()
    elements = []
    for element in loader_of_tasks(loader, list(_tasks(order, segment)), seed=given.seed):
        if isinstance(element, Failure):
            raise raised_at(element, _producer(given))
        elements.append(owned(element, always=loader.num_workers == 0))
    return LoadedSegment(segment, elements, started_at, time.perf_counter() - began)


def _tasks(order: Order, segment: Segment) -> Iterator[Task]:
    for index, row in enumerate(order.rows(segment.epoch, segment.start, segment.stop), segment.start):
        yield Task(segment.epoch, index, row)
    for index in segment.padding:
        yield Task(segment.epoch, index, order.rows(segment.epoch, index, index + 1)[0])


def _indexed(given: RepairInput, loaded: LoadedSegment) -> Iterator[tuple[int, Any]]:
    return enumerate(loaded.elements, loaded.segment.start)


def _commit(given: RepairInput, store: ObjectStore, segment: Segment, shard: EncodedShard, times: Times) -> ShardRecord:
    producer = _producer(given)
    began = time.perf_counter()
    key = put_object(store, producer, segment, shard)
    upload_s = time.perf_counter() - began
    record = record_of(producer, segment, shard, key=key, times=times, upload_s=upload_s, committed_at=time.time())
    return commit(store, record, run=given.run).record


def _refuse_difference(given: RepairInput, record: ShardRecord, shard: EncodedShard) -> None:
    made = (shard.num_bytes, shard.schema_length, shard.schema_crc32, shard.content_digest, shard.lanes)
    wanted = (record.num_bytes, record.schema_length, record.schema_crc32, record.content_digest, record.lanes)
    if made != wanted:
        raise DeliveryError(
            f"segment {record.n} of epoch {record.epoch} of loader '{record.loader}' (elements {record.start} to"
            f" {record.stop - 1}) was lost, and prepared again on {given.host} it has other values than {record.host}"
            " committed: the loader is not deterministic, so its stream cannot be completed. Seed what the dataset"
            " draws from besides python's, numpy's and torch's generators, and start the run anew",
            loader=record.loader,
            epoch=record.epoch,
            n=record.n,
            host=given.host,
        )


def main(argv: list[str]) -> int:
    """Run the program; see ``taas_tasks.prep.program.run_program``. It ends with the feeder that started it."""
    die_with_parent()
    return run_program(argv, RepairInput, run)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
