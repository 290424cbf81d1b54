"""Preparing one committed segment again, on the host that lacks it: ``python -m taas_tasks.prep.repair_program INPUT``.

The feeder starts it when a segment's object, or its ledger record, is gone or wrong; so does a machine that waits for a
record of another's. The segment's owner prepares its share (of streams: the segment's own) again in this process, seen
against a store in which this one segment is not committed yet: so the elements are made by the very code that made them
first, whatever kind of loader it is, and what is committed besides is passed over. What the owner would write for the
segment is caught. A record that is there is kept, as hosts have read it: what is made must have its checksums, and
takes the place of its object. Without a record it is committed as usual.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from taas.errors import DeliveryError, ObjectMissing, PrepareError
from taas_tasks.launch.processes import die_with_parent
from taas_tasks.layout import RunKeys
from taas_tasks.ledger import read_record
from taas_tasks.ledger_reader import LedgerReader
from taas_tasks.plan import owner_of, stream_owner
from taas_tasks.prep.commit import commit
from taas_tasks.prep.prepare_program import prepare_share
from taas_tasks.prep.program import leave, run_program
from taas_tasks.program_values import PrepareInput, ProgramInput
from taas_tasks.store.base import Content, ObjectInfo, ObjectStore
from taas_tasks.streams import MergedProgress
from taas_tasks.values import LoaderPlan, Plan, ShardRecord


class RepairInput(ProgramInput):
    """Which segment to prepare again. ``generation`` is that of no other try: it is in the keys of what is made."""

    plan: str
    loader: str
    allow_pickle: bool = False
    epoch: int
    stream: int
    n: int


def run(given: RepairInput, store: ObjectStore, folder: Path) -> dict[str, Any]:
    """Prepare the segment again and put it where it belongs; return its key. ``folder`` becomes the project's folder.

    Raises:
        DeliveryError: what is made now is not what was committed.
        PrepareError: the elements cannot be made.
    """
    plan = Plan.model_validate_json(store.get(given.plan))
    record = _record(given, given.n, store)
    made = _made_again(given, plan, store, folder, end=_end_of(given, record, store))
    key = made.record.key if record is None else record.key
    if record is not None:
        _refuse_difference(given, record, made.record)
    store.put(key, made.shard)
    if record is None:
        key = commit(store, made.record, run=given.run).record.key
    return {"key": key}


def _record(given: RepairInput, n: int, store: ObjectStore) -> ShardRecord | None:
    """Return the record of a segment of the lost one's stream."""
    key = RunKeys(given.run).ledger_record(given.loader, given.epoch, given.stream, n)
    try:
        return read_record(store.get(key), key)
    except ObjectMissing:
        return None


def _end_of(given: RepairInput, record: ShardRecord | None, store: ObjectStore) -> int | None:
    """Return where the segment ends in its stream; None where the epoch, or nothing that is known, ends it."""
    if record is not None:
        return None if record.last_of_epoch else record.stop
    following = _record(given, given.n + 1, store)
    return following.start if following is not None else None


# --- the owner's work, seen against a store without the segment ------------------------------------------------------


@dataclass(frozen=True)
class _Made:
    """What a producer wrote for the segment."""

    shard: bytes
    record: ShardRecord


class _Caught(BaseException):
    """Ends the producer, past whoever handles errors: the segment is made."""


class _StoreWithout:
    """A store in which one segment is not committed; what is written for it is caught, then every call ends the caller.

    Everything else is the real store's: segments that were not committed either may be committed on the way.

    Args:
        store: the real one.
        record_key: of the segment.
        shard_key: where the producer puts the segment's object.
        told: objects that are other ones than in the real store.
    """

    def __init__(self, store: ObjectStore, *, record_key: str, shard_key: str) -> None:
        self._store, self._record_key, self._shard_key = store, record_key, shard_key
        self.told: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._shard: bytes | None = None
        self.made: _Made | None = None

    def __getattr__(self, name: str) -> Any:
        self._leave_when_made()
        return getattr(self._store, name)

    def _leave_when_made(self) -> None:
        if self.made is not None:
            raise _Caught

    def get(self, key: str) -> bytes:
        self._leave_when_made()
        if key == self._record_key:
            raise ObjectMissing(f"no object has the key {key!r}", key=key)
        return self.told[key] if key in self.told else self._store.get(key)

    def head(self, key: str) -> ObjectInfo | None:
        self._leave_when_made()
        return None if key == self._record_key else self._store.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self._leave_when_made()
        return (one for one in self._store.list(prefix, start_after=start_after) if one.key != self._record_key)

    def put(self, key: str, data: Content) -> None:
        self._leave_when_made()
        if key == self._shard_key:
            self._shard = b"".join([data] if isinstance(data, (bytes, memoryview)) else data)
        else:
            self._store.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._leave_when_made()
        if key != self._record_key:
            return self._store.put_if_absent(key, data)
        with self._lock:
            assert self._shard is not None, "a record is put after its object"
            self.made = _Made(self._shard, read_record(data, key))
        raise _Caught


def _made_again(given: RepairInput, plan: Plan, store: ObjectStore, folder: Path, *, end: int | None) -> _Made:
    loader_plan = plan.loaders[given.loader]
    keys, machine = RunKeys(given.run), _owner(given, loader_plan)
    place = (given.loader, given.epoch, given.stream, given.n)
    view = _StoreWithout(
        store,
        record_key=keys.ledger_record(*place),
        shard_key=keys.shard(*place, generation=given.generation, machine=machine),
    )
    if loader_plan.is_merged and end:
        units = _units_up_to(given, loader_plan, cast(ObjectStore, view), end=end)
        cut = loader_plan.model_copy(update={"units": units})
        view.told[given.plan] = plan.model_copy(update={"loaders": {given.loader: cut}}).to_bytes()
    share = PrepareInput.model_validate({**given.model_dump(), "machine": machine})
    with contextlib.suppress(_Caught):
        prepare_share(share, cast(ObjectStore, view), folder, only_stream=given.stream)
    if view.made is None:
        raise PrepareError(
            f"loader {given.loader!r} has no segment {given.n} of epoch {given.epoch} any more: it yields less than it"
            " did; start the run anew"
        )
    return view.made


def _owner(given: RepairInput, plan: LoaderPlan) -> int:
    if plan.inspection.read_by == "index":
        return owner_of(given.epoch, given.n, machines=plan.machines)
    return stream_owner(given.stream, machines=plan.machines)


def _units_up_to(given: RepairInput, plan: LoaderPlan, view: ObjectStore, *, end: int) -> int:
    """Return how many units need a stream up to ``end`` and no further.

    A stream's segment may end where more of it was not certain to be needed at that time: now more is.
    """
    reader = LedgerReader(view, given.run, plan)
    reader.poll()
    merged = cast(MergedProgress, reader.merged)
    return (merged.units_before(given.epoch) or 0) + merged.merge(given.epoch).index_of(given.stream, end - 1) + 1


def _refuse_difference(given: RepairInput, record: ShardRecord, made: ShardRecord) -> None:
    if _content(made) != _content(record):
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


def _content(record: ShardRecord) -> tuple[Any, ...]:
    bounds = (record.start, record.stop, record.num_padding)
    return (*bounds, record.num_bytes, record.schema_length, record.schema_crc32, record.content_digest, record.lanes)


def main(argv: list[str]) -> int:
    """Run the program; see ``taas_tasks.prep.program.run_program``. It ends with the feeder that started it."""
    die_with_parent()
    return run_program(argv, RepairInput, run)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
