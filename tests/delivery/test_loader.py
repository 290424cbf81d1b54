from __future__ import annotations

import gc
import json
import logging
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from taas.errors import DeliveryError
from taas_tasks.delivery.counters import read_passes
from taas_tasks.layout import RunKeys
from taas_tasks.store.base import UsePiece
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import SegmentSizes
from tests.delivery.support import RUN, Prepared, element, feeding, ids, launch_plan, rule
from tests.shards.trees import same


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.mark.parametrize(
    ("nnodes", "nproc", "remainder", "known_length"),
    [
        *((1, 1, "pad", True), (1, 2, "drop", True), (1, 3, "pad", False), (1, 2, "drop", False), (1, 8, "pad", True)),
        *((2, 8, "pad", True), (2, 8, "drop", False), (4, 8, "pad", True)),
    ],
)
def test_every_rank_gets_the_elements_of_the_rule_in_every_epoch(
    store: MemoryStore, tmp_path: Path, nnodes: int, nproc: int, remainder: str, known_length: bool
) -> None:
    prepared = Prepared(store, units=2 * 101 + 50, length=101, known_length=known_length).commit_all()
    plan = launch_plan(prepared, nnodes=nnodes, nproc=nproc, remainder=remainder)
    with ExitStack() as stack:
        hosts = [stack.enter_context(feeding(store, plan, tmp_path, node_rank=n)) for n in range(nnodes)]
        for host in hosts:
            for local_rank in range(nproc):
                loader = host.loader(local_rank)
                rank = host.node_rank * nproc + local_rank
                for epoch in range(3):
                    expected = rule(
                        prepared, epoch=epoch, rank=rank, world_size=nnodes * nproc, drop=remainder == "drop"
                    )
                    assert ids(loader) == expected


def test_elements_are_those_that_were_prepared_and_the_loader_is_a_dataloader(
    store: MemoryStore, tmp_path: Path
) -> None:
    prepared = Prepared(store, units=10, length=10).commit_all()
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        loader = host.loader(0)
        assert isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        assert (loader.batch_size, loader.num_workers, len(loader), len(loader.dataset)) == (4, 0, 10, 10)
        loader.set_epoch(3)
        loader.sampler.set_epoch(3)  # type: ignore[union-attr]
        assert all(same(got, element(0, index)) for index, got in enumerate(loader))


def test_a_part_that_is_not_committed_yet_is_waited_for_and_the_waiting_is_measured(
    store: MemoryStore, tmp_path: Path
) -> None:
    prepared = Prepared(store, units=40, length=40)
    prepared.commit(0, 0)
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        loader = host.loader(0)

        def write_slowly() -> None:
            for epoch, n in prepared.segments()[1:]:
                time.sleep(0.15)
                prepared.commit(epoch, n)

        writer = threading.Thread(target=write_slowly)
        writer.start()
        assert ids(loader) == rule(prepared, epoch=0, rank=0, world_size=1)
        writer.join()
    (one,) = read_passes(host.counters_dir)
    assert 0.1 < one.wait_s < 10


def test_len_of_an_iterable_waits_until_the_epoch_is_prepared_and_says_so(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = Prepared(store, units=70, length=40, known_length=False)
    prepared.commit(0, 0)
    rest = threading.Timer(0.3, lambda: [prepared.commit(*one) for one in prepared.segments()[1:]])
    with feeding(store, launch_plan(prepared, nproc=2), tmp_path) as host, caplog.at_level(logging.INFO, "taas"):
        rest.start()
        loader = host.loader(1)
        assert len(loader) == 20
        assert "waiting until epoch 0 is prepared" in caplog.text
        assert ids(loader) == rule(prepared, epoch=0, rank=1, world_size=2)
        assert len(loader) == 15
        rest.join()


def test_a_last_partial_epoch_is_a_shorter_pass_and_then_epochs_are_replayed_in_order(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = Prepared(store, units=30, length=20).commit_all()
    with feeding(store, launch_plan(prepared, nproc=2), tmp_path) as host:
        loader = host.loader(0)
        lengths = []
        for epoch in (0, 1, 0, 1):
            lengths.append(len(loader))
            assert ids(loader) == rule(prepared, epoch=epoch, rank=0, world_size=2)
        assert lengths == [10, 5, 10, 5]
    assert [(one.epoch, one.replay, one.complete) for one in read_passes(host.counters_dir)] == [
        *((0, False, True), (1, False, True), (0, True, True), (1, True, True))
    ]
    assert "pass 3 replays epoch 0: only 2 epoch(s) were prepared" in caplog.text


def test_an_iterables_epochs_are_replayed_when_the_ledger_says_that_there_are_no_more(
    store: MemoryStore, tmp_path: Path
) -> None:
    prepared = Prepared(store, units=30, length=20, known_length=False).commit_all()
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        loader = host.loader(0)
        assert [{e for e, _ in ids(loader)} for _ in range(4)] == [{0}, {1}, {0}, {1}]
    assert [one.replay for one in read_passes(host.counters_dir)] == [False, False, True, True]


def test_drop_passes_over_a_last_epoch_without_a_step(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=23, length=20).commit_all()
    with feeding(store, launch_plan(prepared, nproc=4, remainder="drop"), tmp_path) as host:
        loader = host.loader(3)
        assert [len(ids(loader)) for _ in range(3)] == [5, 5, 5]
    assert [one.epoch for one in read_passes(host.counters_dir)] == [0, 0, 0]


def test_the_epoch_ends_with_the_last_yield_not_with_stop_iteration(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=16, length=8).commit_all()
    with feeding(store, launch_plan(prepared, nproc=2), tmp_path) as host:
        loader = host.loader(0)
        iterator = iter(loader)
        first = [next(iterator) for _ in range(4)]  # a trainer that knows len() never asks for a fifth
        assert ids(first) == rule(prepared, epoch=0, rank=0, world_size=2)
        assert len(loader) == 4
        assert ids(loader) == rule(prepared, epoch=1, rank=0, world_size=2)
        with pytest.raises(StopIteration):
            next(iterator)
    assert [one.complete for one in read_passes(host.counters_dir)] == [True, True]


def test_len_is_the_ended_passs_until_set_epoch_says_that_the_next_begins(store: MemoryStore, tmp_path: Path) -> None:
    """Lightning asks ``len`` before ``iter``; a script may ask it in the body of a pass's last step."""
    prepared = Prepared(store, units=12, length=8).commit_all()
    with feeding(store, launch_plan(prepared, nproc=2), tmp_path) as host:
        loader = host.loader(0)
        iterator = iter(loader)
        lengths = [len(loader) for _ in range(4) if next(iterator)]
        loader.sampler.set_epoch(1)  # type: ignore[union-attr]
        lengths.append(len(loader))
        middle = iter(loader)
        next(middle)
        loader.set_epoch(7)  # in the middle of a pass it says nothing
        assert [*lengths, len(loader)] == [4, 4, 4, 4, 2, 2]


def test_a_pass_that_was_left_is_begun_anew_and_both_are_accounted_for(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=40, length=40).commit_all()
    with feeding(store, launch_plan(prepared, nproc=2), tmp_path) as host:
        loader = host.loader(1)
        for number, _ in enumerate(loader):
            if number == 2:
                break
        iter(loader)  # without taking anything: no pass
        assert ids(loader) == rule(prepared, epoch=0, rank=1, world_size=2)
    passes = read_passes(host.counters_dir)
    assert [(one.number, one.epoch, one.num_steps, one.complete) for one in passes] == [
        (0, 0, 3, False),
        (1, 0, 20, True),
    ]


def test_an_iterator_that_was_left_says_so_instead_of_ending(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=40, length=40).commit_all()
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        loader = host.loader(0)
        started, unstarted = iter(loader), iter(loader)
        with pytest.raises(DeliveryError, match="this iterator of loader 'data' was left"):
            next(started)
        next(unstarted)
        iter(loader)
        with pytest.raises(DeliveryError, match="one pass at a time"):
            next(unstarted)


def test_leaving_every_pass_early_is_warned_about_once(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = Prepared(store, units=40, length=20).commit_all()
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        loader = host.loader(0)
        for _ in range(4):  # as Lightning's limit_train_batches does
            assert ids([next(iter(loader))]) == [(0, 0)]
    assert caplog.text.count("was left before its end 2 times and begins at the same element") == 1


@pytest.mark.parametrize(("before", "after", "length"), [(8, 4, 100), (2, 8, 100), (2, 8, 96), (4, 1, 33), (1, 8, 7)])
@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_a_resume_at_another_world_size_goes_on_where_the_loop_stood(
    store: MemoryStore, tmp_path: Path, before: int, after: int, length: int, remainder: str
) -> None:
    prepared = Prepared(store, units=2 * length, length=length).commit_all()
    steps = 3
    with feeding(store, launch_plan(prepared, nproc=before, remainder=remainder), tmp_path / "1") as host:
        loader = host.loader(0)
        iterator = iter(loader)
        for _ in range(steps):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        del iterator
        assert loader.state_dict() == state  # also after the loop was left
    position = steps * before
    drop = remainder == "drop"
    got: set[tuple[int, int]] = set()
    with feeding(store, launch_plan(prepared, nproc=after, remainder=remainder), tmp_path / "2") as host:
        for rank in range(after):
            loader = host.loader(rank)
            loader.load_state_dict(state)
            expected = rule(prepared, epoch=0, rank=rank, world_size=after, offset=position, drop=drop)
            if expected:
                assert len(loader) == steps + len(expected)  # as trainers count: with the steps before
                found = ids(loader)
                assert found == expected
                got.update(found)
            assert ids(loader) == rule(prepared, epoch=1, rank=rank, world_size=after, drop=drop)
    whole = (length - position) // after * after if drop else length - position
    assert {(0, index) for index in range(position, position + whole)} <= got


def test_a_state_at_an_epochs_end_goes_on_with_the_next_epoch(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=20, length=10).commit_all()
    with feeding(store, launch_plan(prepared, nproc=2), tmp_path) as host:
        loader, other = host.loader(0), host.loader(0)
        iterator = iter(loader)
        states = [loader.state_dict() for _ in iterator]
        assert (states[3]["position"], states[3]["step"]) == (8, 4)
        assert states[-1] == {**states[0], "pass": 1, "position": 0, "step": 0}
        other.load_state_dict({**states[0], "position": 10})  # as a trainer may have counted it
        assert ids(other) == rule(prepared, epoch=1, rank=0, world_size=2)


def test_the_state_of_another_loader_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    with feeding(store, launch_plan(Prepared(store, units=8, length=8), nproc=1), tmp_path) as host:
        loader = host.loader(0)
        with pytest.raises(DeliveryError, match="loader 'data' was given the state of 'other', version 1"):
            loader.load_state_dict({"version": 1, "loader": "other", "pass": 0, "position": 0, "step": 0})


@pytest.mark.parametrize(("size", "found"), [(None, "there is no process group"), (1, "the process group has 1 rank")])
def test_without_a_process_group_of_all_ranks_it_refuses_to_iterate(
    store: MemoryStore, tmp_path: Path, size: int | None, found: str
) -> None:
    prepared = Prepared(store, units=8, length=8).commit_all()
    with feeding(store, launch_plan(prepared, nproc=4), tmp_path) as host:
        loader = host.loader(0, group_size=lambda: size)
        assert len(loader) == 2
        with pytest.raises(DeliveryError, match=rf"delivered to 4 ranks, but {found}.*init_process_group"):
            next(iter(loader))


def test_writing_in_place_is_seen_by_no_other_rank_and_no_later_pass(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=8, length=8).commit_all()
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        loader, other = host.loader(0), host.loader(0)
        for index, one in enumerate(loader):
            one["x"].add_(1000)
            assert float(one["x"][0]) == index + 1000
        assert [float(one["x"][0]) for one in other] == list(range(8))
        assert [float(one["x"][0]) for one in loader] == list(range(8))


def test_elements_that_are_kept_outlive_the_pass_the_feeder_and_the_cache(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=64, length=64).commit_all()
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        kept = list(host.loader(0))
    gc.collect()
    assert not list((host.folder / "cache").iterdir())
    assert all(same(one, element(0, index)) for index, one in enumerate(kept))


def test_nothing_is_left_open_after_many_passes(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=64, length=64).commit_all()

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir())) + Path("/proc/self/maps").read_text().count("(deleted)")

    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        loader = host.loader(0)
        for _ in range(5):  # some files stay, to be used again
            ids(loader)
            next(iter(loader))
        time.sleep(0.3)
        before = open_files()
        for _ in range(10):
            ids(loader)
            next(iter(loader))
        gc.collect()
        time.sleep(0.3)
        assert open_files() <= before + 2


def test_a_rank_that_iterates_alone_gets_all_and_holds_nobody_back(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=256, length=256, width=1000).commit_all()
    one_part = 150_000
    with feeding(store, launch_plan(prepared, nproc=2, cache_bytes=one_part * 2), tmp_path) as host:
        mine, other = host.loader(0), host.loader(1)
        stuck = iter(other)
        next(stuck)  # an iterator that is opened and then forgotten
        assert ids(mine) == rule(prepared, epoch=0, rank=0, world_size=2)
        assert ids(mine) == rule(prepared, epoch=0, rank=0, world_size=2)
        assert ids(stuck) == rule(prepared, epoch=0, rank=1, world_size=2)[1:]


def test_two_loaders_in_turn_on_ranks_that_run_apart_do_not_lock_each_other(store: MemoryStore, tmp_path: Path) -> None:
    both = [Prepared(store, units=200, length=200, name=name, width=1000).commit_all() for name in ("a", "b")]
    with feeding(store, launch_plan(*both, nproc=2, cache_bytes=600_000), tmp_path) as host:
        zipped = zip(host.loader(0, "a"), host.loader(0, "b"), strict=True)
        first = [(ids([a])[0], ids([b])[0]) for a, b in zipped]
        zipped = zip(host.loader(1, "b"), host.loader(1, "a"), strict=True)
        second = [(ids([b])[0], ids([a])[0]) for b, a in zipped]
    assert first == [(one, one) for one in rule(both[0], epoch=0, rank=0, world_size=2)]
    assert second == [(one, one) for one in rule(both[0], epoch=0, rank=1, world_size=2)]


def test_a_budget_under_one_part_is_an_error_that_names_both_numbers(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=64, length=64, width=10_000).commit_all()
    with feeding(store, launch_plan(prepared, nproc=1, cache_bytes=100_000), tmp_path) as host:
        loader = host.loader(0)
        with pytest.raises(DeliveryError, match=r"host-0 needs \d+ bytes .* may use 100000 .*raise cache_gb"):
            list(loader)


def test_a_flipped_byte_is_fetched_again_and_then_an_error_that_names_segment_and_host(
    store: MemoryStore, tmp_path: Path
) -> None:
    prepared = Prepared(store, units=64, length=64).commit_all()
    key = RunKeys(RUN).shard("data", 0, 0, 3, generation=1, machine=0)
    good = store.get(key)
    store.put(key, good[:-100] + b"\xff" + good[-99:])
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        found: list[Any] = []
        with pytest.raises(DeliveryError, match=r"segment 3 of epoch 0 .*host host-0: lane \d+ has checksum"):
            found.extend(host.loader(0))
        assert ids(found) == [(0, index) for index in range(28)]
        assert not read_passes(host.counters_dir)[0].complete
        store.put(key, good)  # prepared again
        assert ids(host.loader(0)) == rule(prepared, epoch=0, rank=0, world_size=1)


def test_a_vanished_object_is_an_error_that_names_segment_and_host(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=64, length=64).commit_all()
    store.delete(RunKeys(RUN).shard("data", 0, 0, 0, generation=1, machine=0))
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        iterator = iter(host.loader(0))
        with pytest.raises(DeliveryError, match=r"segment 0 of epoch 0 .*host host-0: no object"):
            next(iterator)
        with pytest.raises(DeliveryError, match="was left"):
            next(iterator)


def test_a_record_that_cannot_be_read_is_an_error_not_a_hang(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=64, length=64)
    prepared.commit(0, 0)
    store.put(RunKeys(RUN).ledger_record("data", 0, 0, 1), b'{"version": 7}')
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        iterator = iter(host.loader(0))
        with pytest.raises(DeliveryError, match=r"00000001\.json' is not what was committed"):
            list(iterator)


def test_a_byte_that_is_wrong_once_is_not_noticed_by_the_ranks(store: MemoryStore, tmp_path: Path) -> None:
    class Flaky(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.read_before: set[str] = set()

        def read_into(self, key: str, start: int, buffer: memoryview, use: UsePiece) -> None:
            buffer[:] = self.get_range(key, start, start + len(buffer))
            if key not in self.read_before:
                self.read_before.add(key)
                buffer[-9] ^= 255
            use(0, buffer)

    flaky = Flaky()
    prepared = Prepared(flaky, units=64, length=64).commit_all()
    with feeding(flaky, launch_plan(prepared, nproc=1), tmp_path) as host:
        assert ids(host.loader(0)) == rule(prepared, epoch=0, rank=0, world_size=1)


def test_a_feeder_that_ends_gives_its_ranks_an_error_not_a_hang(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=64, length=64)
    prepared.commit(0, 0)
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        iterator = iter(host.loader(0))
        for _ in range(4):
            next(iterator)
    with pytest.raises(DeliveryError, match=r"the feeder at .* has ended while this rank still needs data"):
        next(iterator)
    with pytest.raises(DeliveryError, match=r"no feeder answers at .*see the feeder's log"):
        next(iter(host.loader(0, connect_s=0.2)))


def test_the_feeder_counts_distinct_elements_and_bytes(store: MemoryStore, tmp_path: Path) -> None:
    prepared = Prepared(store, units=50, length=50).commit_all()
    plan = launch_plan(prepared, nnodes=2, nproc=8)
    with ExitStack() as stack:
        hosts = [stack.enter_context(feeding(store, plan, tmp_path, node_rank=n)) for n in range(2)]
        for host in hosts:
            for _ in range(2):
                ids(host.loader(0))
    stats = [json.loads(host.stats_path.read_text()) for host in hosts]
    assert sum(one["delivered"]["data"] for one in stats) == 50
    assert all(one["delivered_bytes"]["data"] > 1000 for one in stats)


def test_a_loader_that_this_host_does_not_deliver_is_named(store: MemoryStore, tmp_path: Path) -> None:
    known, other = Prepared(store, units=8, length=8).commit_all(), Prepared(store, units=8, length=8, name="other")
    with feeding(store, launch_plan(known, nproc=1), tmp_path) as host:
        host.plan = launch_plan(known, other, nproc=1)
        with pytest.raises(DeliveryError, match="delivers no loader 'other'; it delivers: data"):
            next(iter(host.loader(0, "other")))


def test_large_segments_of_a_small_cache_flow_through(store: MemoryStore, tmp_path: Path) -> None:
    sizes = SegmentSizes(first=32, largest=32, machines=1)
    prepared = Prepared(store, units=640, length=640, sizes=sizes, width=2000).commit_all()
    with feeding(store, launch_plan(prepared, nproc=2, cache_bytes=700_000), tmp_path) as host:
        loaders = [iter(host.loader(rank)) for rank in range(2)]
        found: list[list[Any]] = [[], []]
        for _ in range(320):
            for rank, iterator in enumerate(loaders):
                found[rank] += ids([next(iterator)])
    for rank in range(2):
        assert found[rank] == rule(prepared, epoch=0, rank=rank, world_size=2)


@pytest.mark.parametrize(("asked", "has_gpu"), [(True, True), (True, False), (False, True)])
def test_elements_are_pinned_when_the_users_loader_did_and_there_is_a_gpu(
    store: MemoryStore, tmp_path: Path, asked: bool, has_gpu: bool
) -> None:
    pinned: list[Any] = []

    def pin(one: Any) -> Any:
        pinned.append(one)
        return {**one, "pinned": True}

    prepared = Prepared(store, units=8, length=8, pin_memory=asked).commit_all()
    with feeding(store, launch_plan(prepared, nproc=2), tmp_path) as host:
        loader = host.loader(1, has_gpu=lambda: has_gpu, pin=pin)
        found = list(loader)
    assert loader.pin_memory is (asked and has_gpu)
    assert [one.get("pinned", False) for one in found] == [asked and has_gpu] * 4
    assert len(pinned) == (4 if asked and has_gpu else 0) and ids(found) == [(0, index) for index in (1, 3, 5, 7)]


def test_a_pass_that_begins_anew_says_that_its_elements_come_again(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = Prepared(store, units=8, length=8).commit_all()
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host, caplog.at_level(logging.INFO, "taas"):
        loader = host.loader(0)
        for number, _ in enumerate(loader):
            if number == 2:
                break
        ids(loader)
    assert caplog.text.count("pass 1 was left after step 3 and begins anew: its elements come again") == 1
