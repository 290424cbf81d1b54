"""A prepared loader in a store, feeders and ranks for tests."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from taas_tasks.delivery.feeder import Feeder
from taas_tasks.delivery.loader import DeliveredLoader, Delivery
from taas_tasks.layout import RunKeys
from taas_tasks.plan import Epochs, epochs_of, num_segments, padding_of, segment_bounds
from taas_tasks.shards.writer import EncodedShard, encode_segment
from taas_tasks.store.base import ObjectStore
from taas_tasks.streams import nominal_index
from taas_tasks.values import Inspection, LaunchPlan, LoaderPlan, SegmentSizes, ShardRecord, Versions

RUN = "run-1"


def element(epoch: int, index: int, *, width: int = 4) -> dict[str, Any]:
    """The element that every test loader yields at ``index`` of ``epoch``."""
    return {"id": torch.tensor([epoch, index]), "x": torch.full((width,), float(index)), "name": f"{epoch}/{index}"}


def ids(elements: Any) -> list[tuple[int, int]]:
    return [(int(one["id"][0]), int(one["id"][1])) for one in elements]


@dataclass
class Prepared:
    """A loader as prep leaves it: its plan, and shards and records in a store as far as they were committed."""

    store: ObjectStore
    units: int
    length: int
    name: str = "data"
    sizes: SegmentSizes = field(default_factory=lambda: SegmentSizes(first=4, largest=32, machines=1))
    known_length: bool = True
    width: int = 4
    pin_memory: bool = False

    @property
    def plan(self) -> LoaderPlan:
        inspection = Inspection(
            loader=self.name,
            kind="map" if self.known_length else "iterable",
            order="recipe" if self.known_length else "sequential",
            read_by="index" if self.known_length else "process",
            epoch_length=self.length if self.known_length else None,
            claimed_length=self.length,
            pin_memory=self.pin_memory,
            num_loader_workers=0,
            batch_size=4,
            element_bytes=100,
            element_seconds=0.01,
            sampled_elements=4,
            versions=Versions(python="3.11"),
        )
        return LoaderPlan(loader=self.name, units=self.units, machines=1, inspection=inspection, sizes=self.sizes)

    @property
    def epochs(self) -> Epochs:
        return epochs_of(self.units, self.length)

    def length_of(self, epoch: int) -> int:
        return self.epochs.length_of(epoch) or 0

    def segments(self) -> list[tuple[int, int]]:
        epochs = range(self.epochs.num or 0)
        return [(e, n) for e in epochs for n in range(num_segments(self.sizes, self.epochs.length_of(e) or 0))]

    def commit_all(self) -> Prepared:
        for epoch, n in self.segments():
            self.commit(epoch, n)
        return self

    def commit(self, epoch: int, n: int) -> ShardRecord:
        length = self.epochs.length_of(epoch) or 0
        start, stop = segment_bounds(self.sizes, n)
        stop = min(stop, length)
        is_last = stop == length
        padding = padding_of(length) if is_last else 0
        elements = [(i, element(epoch, i % length, width=self.width)) for i in range(start, stop + padding)]
        shard = encode_segment(elements, allow_pickle=False)
        key = RunKeys(RUN).shard(self.name, epoch, 0, n, generation=1, machine=0)
        self.store.put(key, b"".join(shard.parts))
        record = self._record(shard, key, epoch, n, start, stop, padding, is_last)
        self.store.put_if_absent(RunKeys(RUN).ledger_record(self.name, epoch, 0, n), record.to_bytes())
        return record

    def _record(
        self, shard: EncodedShard, key: str, epoch: int, n: int, start: int, stop: int, padding: int, is_last: bool
    ) -> ShardRecord:
        return new_record(
            shard,
            loader=self.name,
            epoch=epoch,
            stream=0,
            n=n,
            start=start,
            stop=stop,
            num_padding=padding,
            last_of_epoch=is_last,
            epoch_length=stop if is_last else None,
            last_of_units=is_last and epoch == (self.epochs.num or 0) - 1,
            key=key,
        )


def new_record(shard: EncodedShard, **fields: Any) -> ShardRecord:
    return ShardRecord(
        **fields,
        num_bytes=shard.num_bytes,
        schema_length=shard.schema_length,
        schema_crc32=shard.schema_crc32,
        lanes=shard.lanes,
        content_digest=shard.content_digest,
        machine=0,
        host="c1",
        generation=1,
        started_at=0,
        committed_at=1,
        load_s=0,
        encode_s=0,
        upload_s=0,
    )


@dataclass
class MergedPrepared:
    """A loader whose K loader workers are its streams, as prep leaves it; ``lengths[epoch % ...][stream]`` of them.

    With ``known_length`` the plan has the epochs' length (map-style, exact): then an epoch's streams are as even as
    elements dealt out one by one. Odd streams tell their end by an empty record.
    """

    store: ObjectStore
    units: int
    lengths: list[list[int]]
    name: str = "data"
    sizes: SegmentSizes = field(default_factory=lambda: SegmentSizes(first=4, largest=16, machines=1))
    known_length: bool = False
    width: int = 4

    @property
    def num_streams(self) -> int:
        return len(self.lengths[0])

    @property
    def plan(self) -> LoaderPlan:
        inspection = Inspection(
            loader=self.name,
            kind="map" if self.known_length else "iterable",
            order="recipe" if self.known_length else "sequential",
            read_by="workers",
            epoch_length=sum(self.lengths[0]) if self.known_length else None,
            claimed_length=None,
            num_loader_workers=self.num_streams,
            num_streams=self.num_streams,
            batch_size=4,
            element_bytes=100,
            element_seconds=0.01,
            sampled_elements=4,
            versions=Versions(python="3.11"),
        )
        return LoaderPlan(loader=self.name, units=self.units, machines=1, inspection=inspection, sizes=self.sizes)

    @cached_property
    def orders(self) -> list[list[tuple[int, int]]]:
        """Of each epoch: (stream, position) in torch's order, cut at units."""
        found, left = [], self.units
        while left:
            lengths = self.lengths[len(found) % len(self.lengths)]
            rounds = sorted((position, stream) for stream, stop in enumerate(lengths) for position in range(stop))
            found.append([(stream, position) for position, stream in rounds][:left])
            left -= len(found[-1])
        return found

    def length_of(self, epoch: int) -> int:
        return len(self.orders[epoch])

    def segments(self) -> list[tuple[int, int, int]]:
        """All segments (epoch, stream, n), stream by stream, each in its order."""
        return [
            key
            for epoch in range(len(self.orders))
            for stream in range(self.num_streams)
            for key in self._cut(epoch, stream)
        ]

    def shuffled(self, seed: int) -> list[tuple[int, int, int]]:
        """The same as the machines might commit them: streams and their epochs in any order, each in sequence."""
        rng, waiting = (
            random.Random(seed),
            [[one for one in self.segments() if one[1] == stream] for stream in range(self.num_streams)],
        )
        found = []
        while any(waiting):
            stream = rng.choice([one for one in waiting if one])
            for _ in range(min(rng.randint(1, 4), len(stream))):
                found.append(stream.pop(0))
        return found

    def commit_all(self) -> MergedPrepared:
        return self.commit_these(self.segments())

    def commit_these(self, segments: Iterable[tuple[int, int, int]]) -> MergedPrepared:
        for one in segments:
            self.commit(*one)
        return self

    def commit(self, epoch: int, stream: int, n: int) -> ShardRecord:
        start, stop, is_last = self._cut(epoch, stream)[epoch, stream, n]
        indices = {place: index for index, place in enumerate(self.orders[epoch])}
        elements = [
            (nominal_index(at, stream, self.num_streams), element(epoch, indices[stream, at], width=self.width))
            for at in range(start, stop)
        ]
        shard = encode_segment(elements, allow_pickle=False)
        key = RunKeys(RUN).shard(self.name, epoch, stream, n, generation=1, machine=0)
        self.store.put(key, b"".join(shard.parts))
        own = {"loader": self.name, "epoch": epoch, "stream": stream, "n": n, "start": start, "stop": stop, "key": key}
        record = new_record(shard, **own, last_of_epoch=is_last, epoch_length=stop if is_last else None)
        self.store.put_if_absent(RunKeys(RUN).ledger_record(self.name, epoch, stream, n), record.to_bytes())
        return record

    def _cut(self, epoch: int, stream: int) -> dict[tuple[int, int, int], tuple[int, int, bool]]:
        """The segments of a stream in an epoch: start, stop, and whether the stream ends there by itself."""
        length = sum(one == stream for one, _ in self.orders[epoch])
        natural = self.lengths[epoch % len(self.lengths)][stream] == length
        cuts: list[tuple[int, int, bool]] = []
        while (start := cuts[-1][1] if cuts else 0) < length:
            stop = min(segment_bounds(self.sizes, len(cuts))[1], length)
            cuts.append((start, stop, natural and stop == length and stream % 2 == 0))
        if natural and not (cuts and cuts[-1][2]):
            cuts.append((length, length, True))
        return {(epoch, stream, n): cut for n, cut in enumerate(cuts)}


def launch_plan(
    *loaders: Prepared | MergedPrepared, nnodes: int = 1, nproc: int = 2, cache_bytes: int = 1 << 26, **more: Any
) -> LaunchPlan:
    return LaunchPlan(
        run=RUN,
        run_id="run 1",
        project="p",
        snapshot="s",
        generation=1,
        nnodes=nnodes,
        nproc_per_node=nproc,
        flavor="g2.8",
        emulate_gpus=True,
        loaders={one.name: one.plan for one in loaders},
        seed=0,
        cache_bytes=cache_bytes,
        **more,
    )


@dataclass
class Host:
    """One host: its feeder's socket and folders, and the loaders of its ranks."""

    plan: LaunchPlan
    node_rank: int
    socket_path: str
    folder: Path

    @property
    def counters_dir(self) -> Path:
        return self.folder / "counters"

    @property
    def stats_path(self) -> Path:
        return self.folder / "stats.json"

    def loader(self, local_rank: int, name: str = "data", **more: Any) -> DeliveredLoader:
        delivery = Delivery(
            rank=self.node_rank * self.plan.nproc_per_node + local_rank,
            world_size=self.plan.world_size,
            feeder_socket=self.socket_path,
            counters_dir=self.counters_dir,
            remainder=self.plan.remainder,
            allow_pickle=self.plan.allow_pickle,
            **{"group_size": lambda: self.plan.world_size, "connect_s": 10.0, **more},
        )
        return DeliveredLoader(self.plan.loaders[name], delivery)


@contextmanager
def new_host(plan: LaunchPlan, folder: Path, *, node_rank: int = 0) -> Iterator[Host]:
    """The folders of a host; the socket has a short path."""
    short = tempfile.mkdtemp(prefix="t-")
    own = folder / f"node-{node_rank}"
    (own / "counters").mkdir(parents=True, exist_ok=True)
    try:
        yield Host(plan, node_rank, f"{short}/s", own)
    finally:
        shutil.rmtree(short)


@contextmanager
def feeding(store: ObjectStore, plan: LaunchPlan, folder: Path, *, node_rank: int = 0) -> Iterator[Host]:
    """A host whose feeder runs in a thread."""
    with new_host(plan, folder, node_rank=node_rank) as host:
        feeder = Feeder(
            store,
            plan,
            node_rank=node_rank,
            socket_path=host.socket_path,
            cache_dir=host.folder / "cache",
            stats_path=host.stats_path,
            host=f"host-{node_rank}",
        )
        thread = threading.Thread(target=feeder.serve)
        thread.start()
        try:
            yield host
        finally:
            feeder.stop()
            thread.join(30)
            assert not thread.is_alive()


def rule(
    prepared: Prepared | MergedPrepared,
    *,
    epoch: int,
    rank: int,
    world_size: int,
    offset: int = 0,
    drop: bool = False,
) -> Any:
    """The ids that a rank must receive in a pass: design's rule, written down on its own."""
    length = prepared.length_of(epoch)
    rest = length - offset
    steps = rest // world_size if drop else -(-rest // world_size)
    return [(epoch, (offset + t * world_size + rank) % length) for t in range(steps)]
