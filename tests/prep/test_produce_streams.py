from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from taas.errors import LoaderError, RunCancelled, StoreUnavailable, StreamTaken, TaasError
from taas_tasks.layout import RunKeys
from taas_tasks.store import open_store
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import Plan, ShardRecord, StoreConfig
from tests.delivery.processes import wait_until
from tests.prep import cases, oracle, stream_cases
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more loader workers than cores
SEED = 3
UNITS = {"more workers than elements": 5, "fewer elements than workers": 7}  # many short epochs
SMALL = {"first": 2, "largest": 4}
KEYS = RunKeys(cases.RUN)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No loader worker and no file descriptor outlives a preparation, however it ends."""
    before = _descriptors()
    yield
    gc.collect()  # an error's traceback holds the element that came last
    assert multiprocessing.active_children() == []
    wait_until(lambda: len(_descriptors()) <= len(before) + 1, timeout_s=60)  # one is the spawn tracker's


def _descriptors() -> list[str]:
    return [str(path) for path in Path("/proc/self/fd").iterdir()]


def plan_of(store: Any, make: stream_cases.Make, *, units: int, machines: int = 1, **more: Any) -> Plan:
    return cases.plan_of(store, make, units=units, machines=machines, seed=SEED, **{"sizes": SMALL} | more)


def prepared(make: stream_cases.Make, *, units: int, **more: Any) -> MemoryStore:
    store = MemoryStore()
    cases.prepare(store, make, plan_of(store, make, units=units, **more))
    return store


def assert_local(store: Any, make: stream_cases.Make, *, units: int) -> list[oracle.Item]:
    stored = oracle.committed_stream(store, cases.RUN, "data")
    oracle.assert_same_stream(stored.stream, oracle.local_stream(make(), seed=SEED, units=units))
    return stored.stream


def numbers(size: int | None = 20, *, num_workers: int = 2, **more: Any) -> DataLoader[Any]:
    return DataLoader(cases.Numbers(size, draws=True), **{"batch_size": None, "num_workers": num_workers} | more)


# --- bitwise the local stream ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "kind"), list(enumerate(stream_cases.ITERABLES)))
def test_machines_that_share_the_workers_of_an_iterable_commit_bitwise_the_local_stream(place: int, kind: str) -> None:
    make, store = stream_cases.ITERABLES[kind], MemoryStore()
    units = UNITS.get(kind, 33)
    plan = plan_of(store, make, units=units, machines=1 + place % 4, has_position="state" in kind)
    assert cases.loader_plan_of(plan).is_merged
    stream_cases.prepare_in_turns(store, make, plan)
    stream = assert_local(store, make, units=units)
    assert kind == "infinite" or stream[-1].epoch >= 1


@pytest.mark.parametrize(("place", "kind"), list(enumerate(stream_cases.EXACT)))
def test_machines_that_share_the_workers_of_an_exact_loader_commit_bitwise_the_local_stream(
    place: int, kind: str
) -> None:
    make, store = stream_cases.EXACT[kind], MemoryStore()
    units = UNITS.get(kind, 23)
    plan = plan_of(store, make, units=units, machines=1 + (place + 1) % 4, randomness="exact")
    assert cases.loader_plan_of(plan).is_merged
    stream_cases.prepare_in_turns(store, make, plan)
    assert_local(store, make, units=units)


def test_a_start_method_of_the_loaders_is_kept() -> None:
    store = prepared(lambda: numbers(5, num_workers=1, multiprocessing_context="spawn"), units=5)
    assert_local(store, lambda: numbers(5, num_workers=1), units=5)


# --- what is read and committed -------------------------------------------------------------------------------------


class Logged(IterableDataset[Any]):
    """Writes down in a file what each of its workers reads; its workers yield ``lengths``, or without end."""

    def __init__(self, file: Path, lengths: tuple[int, ...] = ()) -> None:
        self.file = file
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        at = 0
        while not self.lengths or at < self.lengths[info.id]:
            with self.file.open("a") as log:
                log.write(f"{info.id}:{at}\n")
            yield torch.tensor([info.id, at])
            at += 1


def test_nothing_is_read_that_is_not_certain_to_be_needed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    prepared(lambda: DataLoader(Logged(log), batch_size=None, num_workers=3), units=11)
    assert sorted(log.read_text().split()) == sorted(f"{at % 3}:{at // 3}" for at in range(11))


def segments(store: MemoryStore) -> list[tuple[int, int, int, int, bool]]:
    found = oracle.records_of(store, cases.RUN, "data")
    return [(one.epoch, one.stream, one.start, one.stop, one.last_of_epoch) for one in found]


def test_a_stream_that_ends_with_a_segment_is_marked_on_that_segment(tmp_path: Path) -> None:
    store = prepared(
        lambda: DataLoader(Logged(tmp_path / "log", (4, 4)), batch_size=None, num_workers=2),
        units=16,
        sizes={"first": 4, "largest": 4},
    )
    assert segments(store) == [(0, 0, 0, 4, True), (0, 1, 0, 4, True), (1, 0, 0, 4, False), (1, 1, 0, 4, False)]


def test_a_stream_that_ends_where_the_units_might_have_ended_gets_an_empty_last_segment(tmp_path: Path) -> None:
    """Stream 0 reaches 3, what is certain of 6 units; then stream 1 ends, more is needed, and stream 0 has no more."""
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        return DataLoader(Logged(tmp_path / "log", (3, 1)), batch_size=None, num_workers=2)

    plan = plan_of(store, make, units=6, machines=2)
    with pytest.raises(StoreUnavailable):
        cases.prepare(stream_cases.Turn(store), make, plan, machine=0, pace=stream_cases.QUICK)
    assert segments(store) == [(0, 0, 0, 2, False), (0, 0, 2, 3, False)]
    stream_cases.prepare_in_turns(store, make, plan)
    assert_local(store, make, units=6)
    assert (0, 0, 3, 3, True) in segments(store)


def test_segments_grow_from_the_first_size_to_the_largest() -> None:
    store = prepared(lambda: numbers(None, num_workers=1), units=40, sizes={"first": 2, "largest": 8})
    assert [stop - start for _, _, start, stop, _ in segments(store)] == [2, 4, 8, 8, 8, 8, 2]


class Once(IterableDataset[Any]):
    """Yields in its first epoch only."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from range(0 if self.epoch else 3)


def test_an_epoch_without_an_element_is_an_error_that_tells_what_is_missing() -> None:
    with pytest.raises(LoaderError, match="yields nothing in epoch 1: 14 of 20 units are missing"):
        prepared(lambda: DataLoader(Once(), batch_size=None, num_workers=2), units=20)


class OneBuffer(IterableDataset[Any]):
    """Yields tensors that lie in the shared memory of a loader worker, more than there are descriptors for."""

    def __iter__(self) -> Iterator[Any]:
        for at in range(60):
            yield {"x": torch.full((3,), at), "n": at}


def test_elements_are_taken_out_of_shared_memory() -> None:
    before = len(_descriptors())
    store = prepared(
        lambda: DataLoader(OneBuffer(), batch_size=None, num_workers=1, prefetch_factor=4),
        units=60,
        sizes={"first": 64, "largest": 64},
    )
    assert len(_descriptors()) < before + 20
    stream = oracle.committed_stream(store, cases.RUN, "data").stream
    assert [(item.element["n"], int(item.element["x"][0])) for item in stream] == [(n, n) for n in range(60)]


# --- retries --------------------------------------------------------------------------------------------------------


class FailsLater(MemoryStore):
    """Refuses to commit after a number of records."""

    def __init__(self, shared: MemoryStore, records: int) -> None:
        super().__init__()
        self._objects = shared._objects
        self._left = records

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self._left == 0:
            raise StoreUnavailable("no more", key=key)
        self._left -= 1
        return super().put_if_absent(key, data)


class ResumableLog(stream_cases.Resumable):
    """Writes down what it yields."""

    def __init__(self, file: Path, size: int) -> None:
        super().__init__(size)
        self.file = file

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            with self.file.open("a") as log:
                log.write(f"{float(element[0])} ")
            yield element


@pytest.mark.parametrize("has_position", [False, True])
def test_a_retry_goes_on_from_the_position_where_the_dataset_has_one(tmp_path: Path, has_position: bool) -> None:
    log, store = tmp_path / "log", MemoryStore()

    def make() -> DataLoader[Any]:
        return DataLoader(ResumableLog(log, 20), batch_size=None, num_workers=2)

    plan = plan_of(store, make, units=30, has_position=has_position, sizes={"first": 2, "largest": 2})
    with pytest.raises(StoreUnavailable):
        cases.prepare(FailsLater(store, 9), make, plan)
    committed = {record.stream: record.stop for record in oracle.records_of(store, cases.RUN, "data")}
    left = {stream: 15 - committed.get(stream, 0) for stream in (0, 1)}
    log.write_text("")
    cases.prepare(store, make, plan, generation=2)
    read = len(log.read_text().split())
    assert read == (sum(left.values()) if has_position else 15 * sum(count > 0 for count in left.values()))
    assert_local(store, make, units=30)
    records = oracle.records_of(store, cases.RUN, "data")
    assert {record.generation for record in records} == {1, 2}
    kept = {key for record in records if (key := record.position_key)}
    assert kept <= {info.key for info in store.list(f"{KEYS.root}positions/")}
    assert bool(kept) == has_position


def test_a_position_that_is_lost_is_read_up_to_again() -> None:
    store, make = MemoryStore(), stream_cases.ITERABLES["a state"]
    plan = plan_of(store, make, units=12, has_position=True)
    with pytest.raises(StoreUnavailable):
        cases.prepare(FailsLater(store, 4), make, plan)
    for info in list(store.list(f"{KEYS.root}positions/")):
        store.delete(info.key)
    cases.prepare(store, make, plan, generation=2)
    assert_local(store, make, units=12)


class Shrinks(cases.Numbers):
    """Yields less when it is read again."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __iter__(self) -> Iterator[Any]:
        is_again = self.file.exists()
        self.file.touch()
        yield from range(3 if is_again else 10)


def test_a_stream_that_is_shorter_when_it_is_read_again_is_an_error(tmp_path: Path) -> None:
    store = MemoryStore()

    def make() -> DataLoader[Any]:
        return DataLoader(Shrinks(tmp_path / "read"), batch_size=None, num_workers=1)

    plan = plan_of(store, make, units=10)
    with pytest.raises(StoreUnavailable):
        cases.prepare(FailsLater(store, 2), make, plan)
    with pytest.raises(LoaderError, match=r"has only 3 elements when it is read again, 6 are committed"):
        cases.prepare(store, make, plan, generation=2)


class LateStore(MemoryStore):
    """Another try's records appear just before ours are put; ``change`` makes them others."""

    def __init__(self, shared: MemoryStore, others: MemoryStore, change: Callable[[ShardRecord], ShardRecord]) -> None:
        super().__init__()
        self._objects = shared._objects
        self._others = others
        self._change = change

    def put_if_absent(self, key: str, data: bytes) -> bool:
        record = ShardRecord.model_validate_json(self._others.get(key))
        self._objects[key] = (self._change(record).to_bytes(), 0.0)
        return super().put_if_absent(key, data)


@pytest.mark.parametrize("change", [{"content_digest": "0" * 64}, {"last_of_epoch": True, "epoch_length": 2}])
def test_a_stream_that_another_try_commits_otherwise_is_left_to_it(change: dict[str, Any]) -> None:
    store, others = MemoryStore(), prepared(numbers, units=8)
    plan = plan_of(store, numbers, units=8)
    late = LateStore(store, others, lambda record: record.model_copy(update={"key": "elsewhere"} | change))
    with pytest.raises(StreamTaken, match="another try reads the same stream") as caught:
        cases.prepare(late, numbers, plan)
    assert caught.value.retryable


def test_a_stream_that_another_try_commits_equally_goes_on() -> None:
    store, others = MemoryStore(), prepared(numbers, units=8)
    plan = plan_of(store, numbers, units=8)
    late = LateStore(store, others, lambda record: record.model_copy(update={"key": "elsewhere"}))
    tally = cases.prepare(late, numbers, plan)
    assert (tally.committed, tally.redone) == (0, 4)
    assert list(store.list(f"{KEYS.root}shards/")) == []


# --- what goes wrong ------------------------------------------------------------------------------------------------


class Odd(Exception):
    """Cannot be made from a message."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Breaks(IterableDataset[Any]):
    """Does something at the third element of its second worker."""

    def __init__(self, does: Callable[[], Any]) -> None:
        self.does = does

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for at in range(6):
            yield self.does() if (at, info.id) == (2, 1) else at


def raises_odd() -> None:
    raise Odd(4, 5)


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (
            raises_odd,
            "raised tests.prep.test_produce_streams.Odd: 4 and 5 in loader worker 1, at element 2 of its stream",
        ),
        (kills_itself, "loader worker 1 was killed by signal 9 while element"),
        (lambda: os._exit(3), "loader worker 1 exited with code 3 while element"),
        (lambda: lambda: 1, "an element could not be sent from the loader worker"),
    ],
)
def test_what_goes_wrong_in_a_loader_worker_names_loader_element_and_host(
    does: Callable[[], Any], message: str
) -> None:
    with pytest.raises(LoaderError) as caught:
        prepared(lambda: DataLoader(Breaks(does), batch_size=None, num_workers=2), units=12)
    assert message in caught.value.message
    assert "loader 'data'" in caught.value.message
    assert "on c1-0" in caught.value.message
    fields = caught.value.fields
    assert (fields["epoch"], fields["stream"]) == (0, 1)
    # a process that dies may take an element with it that it has made but not sent yet
    assert fields["position"] == 2 or (" while element" in message and fields["position"] < 2)
    if does is raises_odd:
        assert "raise Odd(4, 5)" in fields["traceback"]


def fails_to_start(worker_id: int) -> None:
    raise ValueError(f"no part {worker_id}")


class CannotBegin(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise OSError("no such bucket")


@pytest.mark.parametrize(
    ("make", "message", "line"),
    [
        (lambda: numbers(worker_init_fn=fails_to_start), "raised ValueError: no part", "raise ValueError"),
        (
            lambda: DataLoader(CannotBegin(), num_workers=2),
            "raised OSError: no such bucket",
            'raise OSError("no such bucket")',
        ),
    ],
)
def test_a_worker_that_cannot_begin_names_the_first_element(make: stream_cases.Make, message: str, line: str) -> None:
    with pytest.raises(LoaderError) as caught:
        prepared(make, units=5)
    assert message in caught.value.message
    assert "at element 0 of its stream in epoch 0 (on c1-0)" in caught.value.message
    assert line in caught.value.fields["traceback"]


def test_the_loaders_timeout_is_kept() -> None:
    with pytest.raises(LoaderError, match=r"no element came within its timeout of 0.5 s; loader worker 1 was asked"):
        prepared(
            lambda: DataLoader(Breaks(lambda: time.sleep(60)), batch_size=None, num_workers=2, timeout=0.5), units=12
        )


def test_an_aborted_run_ends_with_its_loader_workers() -> None:
    store = MemoryStore()
    plan = plan_of(store, numbers, units=1000)
    store.put(KEYS.abort, b"{}")
    with pytest.raises(RunCancelled):
        cases.prepare(store, numbers, plan)
    assert list(store.list(KEYS.ledger("data"))) == []


# --- processes, a real store, kills ---------------------------------------------------------------------------------


class Slow(stream_cases.Resumable):
    """Takes its time."""

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            time.sleep(0.02)
            yield element


def slow() -> DataLoader[Any]:
    return DataLoader(Slow(40), batch_size=2, num_workers=3)


class Machines:
    """Machines as processes; all are ended."""

    def __init__(self, config: StoreConfig, plan: Plan) -> None:
        self.config = config
        self.plan = plan
        self.running: list[multiprocessing.Process] = []

    def start(self, machine: int, generation: int) -> multiprocessing.Process:
        process = multiprocessing.Process(target=self._prepare, args=(machine, generation))
        process.start()
        self.running.append(process)
        return process

    def _prepare(self, machine: int, generation: int) -> None:
        store = open_store(self.config)
        try:
            cases.prepare(store, slow, self.plan, machine=machine, generation=generation, pace=stream_cases.QUICK)
        except TaasError:
            os._exit(1)
        os._exit(0)

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.join()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.store
@pytest.mark.parametrize("has_position", [False, True])
def test_a_machine_killed_in_the_middle_loses_and_doubles_nothing_and_its_workers_end(
    s3_server: S3Server, has_position: bool
) -> None:
    config = s3_server.fresh_config()
    store = open_store(config)
    plan = plan_of(store, slow, units=66, machines=2, has_position=has_position, sizes={"first": 4, "largest": 4})
    machines = Machines(config, plan)
    try:
        other, killed = machines.start(1, 1), machines.start(0, 1)
        wait_until(lambda: len(oracle.records_of(store, cases.RUN, "data")) >= 4, timeout_s=60)
        assert killed.pid is not None
        orphans = children_of(killed.pid)
        os.kill(killed.pid, signal.SIGKILL)
        killed.join()
        assert orphans
        again = machines.start(0, 2)
        for process in (again, other):
            process.join(60)
        assert (again.exitcode, other.exitcode) == (0, 0)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans), timeout_s=60)
    finally:
        machines.end()
    assert_local(store, slow, units=66)
    assert {record.generation for record in oracle.records_of(store, cases.RUN, "data")} == {1, 2}
