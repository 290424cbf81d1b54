"""Our own shards and ledger records of a workload, written as preparation writes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.delivery.workloads import WORKLOADS, Element, element, num_bytes
from taas_tasks.layout import RunKeys
from taas_tasks.plan import choose_sizes, num_segments, segment_bounds
from taas_tasks.shards.writer import encode_segment
from taas_tasks.values import Inspection, LaunchPlan, LoaderPlan, ShardRecord, Versions

CACHE_BYTES = 1 << 30


def as_tensors(one: Element) -> dict[str, Any]:
    """Return the element as a loader gives it."""
    return {name: torch.tensor(leaf) if hasattr(leaf, "dtype") else leaf for name, leaf in one.items()}


def run_of(workload: str, epochs: int) -> str:
    return f"bench-{workload}-{epochs}"


def loader_plan(workload: str, count: int, *, epochs: int = 1) -> LoaderPlan:
    """Return the plan, its segments as ``plan`` chooses them for one epoch (of a loader that makes 100 MB/s)."""
    measured = [num_bytes(element(workload, index)) for index in range(min(count, 32))]
    element_bytes = sum(measured) / len(measured)
    inspection = Inspection(
        loader="data",
        kind="map",
        order="recipe",
        epoch_length=count,
        claimed_length=count,
        num_loader_workers=2,
        batch_size=32 if WORKLOADS[workload].collated else None,
        element_bytes=element_bytes,
        element_seconds=element_bytes / 1e8,
        sampled_elements=len(measured),
        versions=Versions(python="3.11"),
    )
    sizes = choose_sizes(inspection, units=count, machines=1, cache_bytes=CACHE_BYTES)
    return LoaderPlan(loader="data", units=count * epochs, machines=1, inspection=inspection, sizes=sizes)


def launch_plan(workload: str, count: int, *, nnodes: int, nproc: int, epochs: int = 1) -> LaunchPlan:
    """Return how a training reads the workload."""
    return LaunchPlan(
        run=run_of(workload, epochs),
        run_id=run_of(workload, epochs),
        project="bench",
        snapshot="none",
        generation=1,
        nnodes=nnodes,
        nproc_per_node=nproc,
        flavor="g2.8",
        emulate_gpus=True,
        loaders={"data": loader_plan(workload, count, epochs=epochs)},
        seed=0,
        cache_bytes=CACHE_BYTES,
    )


def write(workload: str, count: int, folder: Path, *, epochs: int) -> list[tuple[str, int]]:
    """Write shards and records below ``folder`` by their keys; return the shards' keys and bytes.

    The run of ``epochs`` epochs has records of its own, which name the same shards: its bytes are read again each time.
    """
    once, often = RunKeys(run_of(workload, 1)), RunKeys(run_of(workload, epochs))
    written = []
    for record, data in _encoded(workload, count, once):
        _put(folder / record.key, data)
        _put(folder / once.ledger_record("data", 0, 0, record.n), record.to_bytes())
        for epoch in range(epochs):
            again = {"epoch": epoch, "last_of_units": record.last_of_units and epoch == epochs - 1}
            _put(folder / often.ledger_record("data", epoch, 0, record.n), record.model_copy(update=again).to_bytes())
        written.append((record.key, record.num_bytes))
    return written


def _encoded(workload: str, count: int, keys: RunKeys) -> Iterator[tuple[ShardRecord, bytes]]:
    sizes = loader_plan(workload, count).sizes
    for n in range(num_segments(sizes, count)):
        start, stop = segment_bounds(sizes, n)
        stop = min(stop, count)
        began = time.time()
        made = ((index, as_tensors(element(workload, index))) for index in range(start, stop))
        shard = encode_segment(made, allow_pickle=False)
        is_last = stop == count
        record = ShardRecord(
            loader="data",
            epoch=0,
            stream=0,
            n=n,
            start=start,
            stop=stop,
            last_of_epoch=is_last,
            epoch_length=count if is_last else None,
            last_of_units=is_last,
            key=keys.shard("data", 0, 0, n, generation=1, machine=0),
            num_bytes=shard.num_bytes,
            schema_length=shard.schema_length,
            schema_crc32=shard.schema_crc32,
            lanes=shard.lanes,
            content_digest=shard.content_digest,
            machine=0,
            host="c0",
            generation=1,
            started_at=began,
            committed_at=time.time(),
            load_s=0,
            encode_s=0,
            upload_s=0,
        )
        yield record, b"".join(shard.parts)


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
