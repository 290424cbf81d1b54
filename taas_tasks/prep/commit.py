"""Committing one segment: the object first, then its ledger record put if absent; whoever loses that race cleans up."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from taas_tasks.layout import RunKeys
from taas_tasks.ledger import read_record
from taas_tasks.shards.writer import EncodedShard
from taas_tasks.store.base import ObjectStore
from taas_tasks.streams import nominal_index
from taas_tasks.values import ShardRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segment:
    """A piece of work: elements [start, stop) of an epoch, and the padding behind them if it is the epoch's last.

    ``padding`` holds the elements (by their index in the epoch) that are repeated; they are stored under the indices
    that follow the epoch's end. Of a loader whose workers are its streams it is a piece of one ``stream``'s epoch.
    """

    epoch: int
    n: int
    start: int
    stop: int
    padding: tuple[int, ...] = ()
    last_of_epoch: bool = False
    last_of_units: bool = False
    stream: int = 0
    num_streams: int = 1

    @property
    def indices(self) -> range:
        """The indices under which the elements and the padding are stored."""
        first, count = nominal_index(self.start, self.stream, self.num_streams), self.num_elements
        return range(first, first + count * self.num_streams, self.num_streams)

    @property
    def id(self) -> tuple[int, int]:
        """``(epoch, n)``."""
        return self.epoch, self.n

    @property
    def num_elements(self) -> int:
        """Elements with padding."""
        return self.stop - self.start + len(self.padding)


@dataclass(frozen=True)
class Producer:
    """Who prepares: part of every key and record."""

    run: str
    loader: str
    machine: int
    host: str
    generation: int


@dataclass(frozen=True)
class Committed:
    """What became of one try: ``won`` when the ledger names this try's object; ``differs`` when another's content does.

    ``record`` is the ledger's.
    """

    record: ShardRecord
    won: bool
    differs: bool


@dataclass(frozen=True)
class Times:
    """When a try began and what its parts took. ``encoded_at`` and so on are unix seconds."""

    started_at: float
    load_s: float
    encode_s: float


def put_object(store: ObjectStore, producer: Producer, segment: Segment, shard: EncodedShard) -> str:
    """Write the segment's object under this try's own key; return the key."""
    key = RunKeys(producer.run).shard(
        *(producer.loader, segment.epoch, segment.stream, segment.n),
        generation=producer.generation,
        machine=producer.machine,
    )
    store.put(key, shard.parts)
    return key


def put_position(store: ObjectStore, producer: Producer, segment: Segment, position: bytes) -> str:
    """Write how a loader worker reads on behind the segment, under this try's own key; return the key."""
    key = RunKeys(producer.run).stream_position(
        *(producer.loader, segment.epoch, segment.stream, segment.n),
        generation=producer.generation,
        machine=producer.machine,
    )
    store.put(key, position)
    return key


def record_of(
    producer: Producer,
    segment: Segment,
    shard: EncodedShard,
    *,
    key: str,
    times: Times,
    upload_s: float,
    committed_at: float,
    position_key: str | None = None,
) -> ShardRecord:
    """Return the record that says all of a written object."""
    return ShardRecord(
        loader=producer.loader,
        epoch=segment.epoch,
        stream=segment.stream,
        n=segment.n,
        start=segment.start,
        stop=segment.stop,
        num_padding=len(segment.padding),
        last_of_epoch=segment.last_of_epoch,
        epoch_length=segment.stop if segment.last_of_epoch else None,
        last_of_units=segment.last_of_units,
        position_key=position_key,
        key=key,
        num_bytes=shard.num_bytes,
        schema_length=shard.schema_length,
        schema_crc32=shard.schema_crc32,
        lanes=shard.lanes,
        content_digest=shard.content_digest,
        machine=producer.machine,
        host=producer.host,
        generation=producer.generation,
        pickled_paths=shard.pickled_paths,
        started_at=times.started_at,
        committed_at=committed_at,
        load_s=times.load_s,
        encode_s=times.encode_s,
        upload_s=upload_s,
    )


def commit(store: ObjectStore, record: ShardRecord, *, run: str) -> Committed:
    """Put the record if the segment has none; otherwise delete this try's object, unless the record names it.

    A reply that was lost looks like a lost race: the record then names this try's key, and the try has won.

    Raises:
        ObjectCorrupt: The segment's record is there and is none.
    """
    key = RunKeys(run).ledger_record(record.loader, record.epoch, record.stream, record.n)
    if store.put_if_absent(key, record.to_bytes()):
        return Committed(record, won=True, differs=False)
    there = read_record(store.get(key), key)
    if there.key == record.key:
        return Committed(there, won=True, differs=False)
    for lost in (record.key, record.position_key):
        if lost is not None:
            store.delete(lost)
    differs = there.content_digest != record.content_digest
    if differs:
        _log.warning("%s", difference(there, record))
    return Committed(there, won=False, differs=differs)


def difference(there: ShardRecord, mine: ShardRecord) -> str:
    """Return the sentence about two tries of a segment that differ."""
    return (
        f"loader {mine.loader!r} is not deterministic: segment {mine.n} of epoch {mine.epoch} (elements {mine.start} to"
        f" {mine.stop - 1}) was prepared by {there.host} (machine {there.machine}, try {there.generation}) and by"
        f" {mine.host} (machine {mine.machine}, try {mine.generation}) with different values; the first is kept."
        ' Seed what the dataset draws from, or ask for randomness "exact"'
    )
