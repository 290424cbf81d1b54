"""Loaders whose loader workers are streams: what every rank receives, whatever the streams, hosts and ends."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from taas_tasks.store.memory import MemoryStore
from tests.delivery.support import Host, MergedPrepared, feeding, ids, launch_plan, rule


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


UNEVEN = {
    1: [[37]],
    3: [[20, 0, 33], [5, 40, 11]],
    4: [[16, 16, 16, 16]],
    8: [[9, 30, 1, 0, 12, 12, 3, 25]],
}


@pytest.mark.parametrize("num_streams", UNEVEN)
@pytest.mark.parametrize(
    ("nnodes", "nproc", "remainder"), [(1, 2, "pad"), (2, 4, "drop"), (4, 8, "pad"), (1, 3, "drop")]
)
def test_every_rank_gets_the_merges_elements_in_every_epoch(
    store: MemoryStore, tmp_path: Path, num_streams: int, nnodes: int, nproc: int, remainder: str
) -> None:
    lengths = UNEVEN[num_streams]
    prepared = MergedPrepared(store, units=2 * sum(lengths[0]) + 21, lengths=lengths)
    plan = launch_plan(prepared, nnodes=nnodes, nproc=nproc, remainder=remainder)
    writer = threading.Thread(target=lambda: prepared.commit_these(prepared.shuffled(num_streams + nproc)))
    with ExitStack() as stack:
        hosts = [stack.enter_context(feeding(store, plan, tmp_path, node_rank=n)) for n in range(nnodes)]
        writer.start()
        for epoch, host, local_rank, found in delivered(prepared, hosts):
            drop = {"drop": remainder == "drop"}
            expected = rule(
                prepared, epoch=epoch, rank=host.node_rank * nproc + local_rank, world_size=nnodes * nproc, **drop
            )
            assert found == expected, (epoch, host.node_rank, local_rank)
        writer.join()


def delivered(prepared: MergedPrepared, hosts: list[Host]) -> Any:
    for host in hosts:
        for local_rank in range(host.plan.nproc_per_node):
            loader = host.loader(local_rank)
            for epoch in range(len(prepared.orders)):
                yield epoch, host, local_rank, ids(loader)
