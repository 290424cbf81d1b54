"""Loaders whose loader workers are streams: what every rank receives, whatever the streams, hosts and ends."""

from __future__ import annotations

import gc
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from taas_tasks.delivery.counters import read_passes
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import SegmentSizes
from tests.delivery.support import Host, MergedPrepared, element, feeding, ids, launch_plan, rule
from tests.shards.trees import same


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


UNEVEN = {
    1: [[37]],
    3: [[20, 0, 33], [5, 40, 11]],
    4: [[16, 16, 16, 16]],
    8: [[9, 30, 1, 0, 12, 12, 3, 25]],
}


def read_all_ranks(prepared: MergedPrepared, hosts: list[Host], *, num_passes: int) -> dict[int, list[Any]]:
    """Let all ranks read at the same time, each in a thread of its own; return the ids of each one's passes."""

    def read(host: Host, local_rank: int) -> tuple[int, list[Any]]:
        loader = host.loader(local_rank)
        return loader._taas_delivery.rank, [ids(loader) for _ in range(num_passes)]

    ranks = [(host, local_rank) for host in hosts for local_rank in range(host.plan.nproc_per_node)]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(pool.map(lambda one: read(*one), ranks))


@pytest.mark.parametrize(
    ("num_streams", "nnodes", "nproc", "remainder"),
    [
        *((1, 1, 2, "pad"), (1, 2, 2, "drop"), (3, 1, 3, "pad"), (3, 2, 4, "drop"), (3, 4, 2, "pad")),
        *((4, 1, 8, "pad"), (4, 4, 2, "drop"), (8, 1, 2, "drop"), (8, 2, 8, "pad"), (8, 4, 1, "pad")),
    ],
)
def test_ranks_get_the_merges_elements_while_streams_arrive_in_any_order(
    store: MemoryStore, tmp_path: Path, num_streams: int, nnodes: int, nproc: int, remainder: str
) -> None:
    lengths = UNEVEN[num_streams]
    prepared = MergedPrepared(store, units=2 * sum(lengths[0]) + 21, lengths=lengths)
    plan = launch_plan(prepared, nnodes=nnodes, nproc=nproc, remainder=remainder)

    def write() -> None:
        for number, one in enumerate(prepared.shuffled(num_streams + nproc)):
            time.sleep(0.02 if number % 4 == 0 else 0)
            prepared.commit(*one)

    writer = threading.Thread(target=write)
    with ExitStack() as stack:
        hosts = [stack.enter_context(feeding(store, plan, tmp_path, node_rank=n)) for n in range(nnodes)]
        writer.start()
        num_passes = len(prepared.orders)
        found = read_all_ranks(prepared, hosts, num_passes=num_passes)
        writer.join()
        passes = [one for host in hosts for one in read_passes(host.counters_dir)]
    drop, world_size = remainder == "drop", nnodes * nproc
    for rank in range(world_size):
        for epoch in range(num_passes):
            expected = rule(prepared, epoch=epoch, rank=rank, world_size=world_size, drop=drop)
            assert found[rank][epoch] == expected, (rank, epoch)
    assert len({(one.epoch, one.num_steps) for one in passes}) == num_passes  # the same steps on every rank
    assert all(one.complete and (one.num_bytes or not one.num_steps) for one in passes)


def test_a_cache_smaller_than_a_part_of_each_stream_lets_ranks_through_that_run_apart(
    store: MemoryStore, tmp_path: Path
) -> None:
    sizes = SegmentSizes(first=16, largest=16, machines=1)
    prepared = MergedPrepared(store, units=192, lengths=[[64, 10, 70, 48]], sizes=sizes, width=2000).commit_all()
    one_part = 16 * 8_000 + 20_000
    with feeding(store, launch_plan(prepared, nproc=2, cache_bytes=one_part), tmp_path) as host:
        mine, other = host.loader(0), host.loader(1)
        stuck = iter(other)
        next(stuck)  # an iterator that is opened and then forgotten
        assert ids(mine) == rule(prepared, epoch=0, rank=0, world_size=2)
        assert ids(stuck) == rule(prepared, epoch=0, rank=1, world_size=2)[1:]


@pytest.mark.parametrize(
    ("lengths", "nnodes"),
    [
        ([64, 6, 20], 3),  # its host of one rank reads stream 0 alone, then stream 2 as well
        ([64, 5], 4),  # it has each second element of stream 0, then others, which lie in other lanes
        ([64, 5, 64], 2),  # it reads all streams, then stream 2 alone
    ],
)
def test_streams_that_end_while_their_parts_are_read_send_other_elements_to_the_ranks(
    store: MemoryStore, tmp_path: Path, lengths: list[int], nnodes: int
) -> None:
    sizes = SegmentSizes(first=64, largest=64, machines=1)
    prepared = MergedPrepared(store, units=sum(lengths), lengths=[lengths], sizes=sizes)
    end = (0, 1, 1)  # the record by which stream 1 tells that it has ended
    prepared.commit_these(one for one in prepared.segments() if one != end)
    with feeding(store, launch_plan(prepared, nproc=1, nnodes=nnodes), tmp_path) as host:
        iterator = iter(host.loader(0))
        before = ids([next(iterator), next(iterator)])
        prepared.commit(*end)
        assert before + ids(iterator) == rule(prepared, epoch=0, rank=0, world_size=nnodes)


@pytest.mark.parametrize(("units", "length"), [(100, 50), (130, 50), (7, 50)])
def test_exact_map_style_loaders_know_their_lengths_and_wait_for_their_own_elements_alone(
    store: MemoryStore, tmp_path: Path, units: int, length: int
) -> None:
    even = [length // 4 + (stream < length % 4) for stream in range(4)]
    prepared = MergedPrepared(store, units=units, lengths=[even], known_length=True)
    with feeding(store, launch_plan(prepared, nproc=4), tmp_path) as host:
        loader = host.loader(1)
        assert len(loader) == -(-min(units, length) // 4)  # nothing is committed yet
        first = [one for one in prepared.segments() if one[1] == 1 and one[2] == 0 and one[0] == 0]
        prepared.commit_these(first)
        iterator = iter(loader)
        assert ids([next(iterator)]) == [(0, 1)]
        prepared.commit_these(one for one in prepared.segments() if one not in first)
        assert ids(iterator) == rule(prepared, epoch=0, rank=1, world_size=4)[1:]
        for epoch in range(1, len(prepared.orders)):
            assert ids(loader) == rule(prepared, epoch=epoch, rank=1, world_size=4)


def test_fewer_elements_than_ranks_are_padded_from_the_start(store: MemoryStore, tmp_path: Path) -> None:
    prepared = MergedPrepared(store, units=3, lengths=[[1, 0, 1, 1]]).commit_all()
    with feeding(store, launch_plan(prepared, nproc=8), tmp_path) as host:
        found = read_all_ranks(prepared, [host], num_passes=2)
    assert found == {rank: [[(0, rank % 3)]] * 2 for rank in range(8)}


@pytest.mark.parametrize(("before", "after"), [(8, 4), (2, 8), (4, 1), (3, 5)])
@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_a_resume_at_another_world_size_goes_on_where_the_loop_stood(
    store: MemoryStore, tmp_path: Path, before: int, after: int, remainder: str
) -> None:
    prepared = MergedPrepared(store, units=116, lengths=[[20, 3, 30, 5]]).commit_all()
    drop = remainder == "drop"
    with feeding(store, launch_plan(prepared, nproc=before, remainder=remainder), tmp_path / "1") as host:
        loader = host.loader(0)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    with feeding(store, launch_plan(prepared, nproc=after, remainder=remainder), tmp_path / "2") as host:
        for rank in {0, after - 1}:
            loader = host.loader(rank)
            loader.load_state_dict(state)
            expected = rule(prepared, epoch=0, rank=rank, world_size=after, offset=3 * before, drop=drop)
            assert ids(loader) == expected
            assert ids(loader) == rule(prepared, epoch=1, rank=rank, world_size=after, drop=drop)
    assert (state["position"], state["step"]) == (3 * before, 3)


def test_len_waits_for_the_epochs_end_and_passes_are_replayed_in_order(store: MemoryStore, tmp_path: Path) -> None:
    prepared = MergedPrepared(store, units=50, lengths=[[12, 3, 15]])
    rest = threading.Timer(0.3, lambda: prepared.commit_these(prepared.segments()[1:]))
    prepared.commit(*prepared.segments()[0])
    with feeding(store, launch_plan(prepared, nproc=2), tmp_path) as host:
        rest.start()
        loader = host.loader(1)
        lengths = [len(loader)]
        assert len(loader.dataset) == 30  # type: ignore[arg-type]
        for epoch in (0, 1, 0, 1):
            assert ids(loader) == rule(prepared, epoch=epoch, rank=1, world_size=2)
            lengths.append(len(loader))
        rest.join()
        assert lengths == [15, 10, 15, 10, 15]
    assert [(one.epoch, one.replay) for one in read_passes(host.counters_dir)] == [
        *((0, False), (1, False), (0, True), (1, True))
    ]


def test_a_pass_left_by_break_is_begun_anew_and_written_elements_are_fresh(store: MemoryStore, tmp_path: Path) -> None:
    prepared = MergedPrepared(store, units=40, lengths=[[20, 12, 8]]).commit_all()
    with feeding(store, launch_plan(prepared, nproc=2), tmp_path) as host:
        loader = host.loader(0)
        for number, one in enumerate(loader):
            one["x"].add_(1000)
            if number == 7:
                break
        again = iter(loader)
        found = list(again)
        assert ids(found) == rule(prepared, epoch=0, rank=0, world_size=2)
        assert all(float(one["x"][0]) == float(one["id"][1]) for one in found)
    passes = read_passes(host.counters_dir)
    assert [(one.num_steps, one.complete, one.replay) for one in passes] == [(8, False, False), (20, True, False)]
    gc.collect()
    assert not list((host.folder / "cache").iterdir())
    assert all(same(one, element(0, int(one["id"][1]))) for one in found)  # without the feeder and its cache


def test_the_feeder_counts_each_element_of_the_streams_once(store: MemoryStore, tmp_path: Path) -> None:
    prepared = MergedPrepared(store, units=60, lengths=[[20, 20, 20]]).commit_all()
    with feeding(store, launch_plan(prepared, nproc=2), tmp_path) as host:
        for rank in range(2):
            ids(host.loader(rank))
    assert json.loads(host.stats_path.read_text())["delivered"] == {"data": 60}


def test_a_rank_that_computes_for_long_keeps_nobody_waiting(store: MemoryStore, tmp_path: Path) -> None:
    """Hundreds of streams have as many answers on their way: more than a connection holds that nobody reads."""
    num_streams, length = 200, 4
    prepared = MergedPrepared(store, units=num_streams * length, lengths=[[length] * num_streams]).commit_all()
    plan = launch_plan(prepared, nproc=2, cache_bytes=1 << 28)
    with feeding(store, plan, tmp_path) as host:
        slow = iter(host.loader(0))
        first = ids([next(slow)])
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: ids(host.loader(1))).result(60) == rule(prepared, epoch=0, rank=1, world_size=2)
        assert first + ids(slow) == rule(prepared, epoch=0, rank=0, world_size=2)
