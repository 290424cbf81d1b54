"""Preparing a loader, or only iterating it, in processes of their own, for the lanes that measure preparation.

Processes come from a fork server that has imported torch and the program, so that a repetition takes its own time only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.synchronize
import os
import resource
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.delivery.common import Options, Section
from benchmarks.delivery.folder_store import folder_store
from taas_tasks.layout import RunKeys, run_key
from taas_tasks.plan import padding_of
from taas_tasks.project import commit
from taas_tasks.stack import processes, seaweed
from taas_tasks.store import ObjectStore, open_store
from taas_tasks.values import Inspection, LoaderPlan, Plan, SegmentSizes, ShardRecord, StoreConfig, Versions

if TYPE_CHECKING:
    from taas_tasks.program_values import PrepareInput

LOADERS = Path(__file__).with_name("prep_loaders.py")
ReadBy = Literal["index", "workers", "process"]
Where = StoreConfig | Path
Start = multiprocessing.synchronize.Barrier
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Load:
    """A loader of ``prep_loaders`` and how much of it is read."""

    loader: str
    units: int
    workers: int
    sizes: tuple[int, int]  # first and largest segment
    read_by: ReadBy = "index"
    element_bytes: int = 12_288
    epochs: int = 1
    batch: int = 1  # samples in an element: element n begins with sample n * batch

    def of(self, share: float) -> Load:
        """Return the same with fewer units, whole lanes of them: the padding of an odd end would count as work."""
        return replace(self, units=max(32, int(self.units * share) // 32 * 32))

    @property
    def epoch_length(self) -> int:
        return -(-self.units // self.epochs)

    @property
    def name(self) -> str:
        return self.loader if self.read_by == "index" else f"{self.loader}, by its workers"


# --- a server, and a run on it --------------------------------------------------------------------------------------


@dataclass
class Server:
    """A real S3 server."""

    config: StoreConfig
    pid: int

    def fresh(self) -> StoreConfig:
        """Return the same server below a prefix that nobody else uses."""
        return self.config.model_copy(update={"prefix": f"b/{secrets.token_hex(6)}"})

    def cpu_s(self) -> float:
        """Return the CPU seconds that the server has used."""
        return sum(cpu_seconds(pid) for pid in [self.pid, *children_of(self.pid)])


@contextmanager
def s3_server(folder: Path) -> Iterator[Server]:
    """A server that keeps its objects below ``folder``; gone at the end."""
    ports = seaweed.SeaweedPorts.find(set())
    config = seaweed.store_config(ports, access_key="bench", secret_key="bench-secret")
    data = folder / "data"
    data.mkdir(parents=True)
    argv = [sys.executable, "-I", "-m", "taas_tasks.stack.guard", *seaweed.command(ports, data)]
    server = processes.start(argv, env=seaweed.environment(config, folder), log=folder / "weed.log", cwd=folder)
    try:
        ready = processes.wait_until(lambda: seaweed.is_ready(ports), timeout_s=30)
        if not ready or not processes.wait_until(lambda: seaweed.is_writable(config), timeout_s=30):
            raise SystemExit(f"no S3 server: {processes.tail(folder / 'weed.log')}")
        yield Server(config, server.pid)
    finally:
        processes.stop(server, grace_s=0)
        seaweed.remove_sockets(ports)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of those of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    """Return the children of a process, theirs included."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(child) for child in path.read_text().split()]
        except OSError:
            continue
        found += direct + [below for child in direct for below in children_of(child)]
    return found


@dataclass(frozen=True)
class Prepared:
    """A run whose project and plan are in a store."""

    run: str
    snapshot: str
    plan: Plan


def begin_run(store: ObjectStore, load: Load, *, machines: int = 1) -> Prepared:
    """Put the project and the plan of one loader into a store."""
    snapshot = commit(store, "bench", {"data.py": LOADERS.read_bytes()}, author="bench").snapshot
    run = run_key(f"bench-{secrets.token_hex(4)}")
    plan = Plan(
        run=run,
        run_id=run,
        project="bench",
        snapshot=snapshot,
        loaders={"data": loader_plan(load, machines=machines)},
        seed=0,
        randomness="exact" if load.read_by == "workers" else "element",
        remainder="pad",
        flavor="g2.8",
        nnodes=1,
        nproc_per_node=8,
        cpus=machines,
    )
    store.put(RunKeys(run).plan, plan.to_bytes())
    return Prepared(run, snapshot, plan)


def loader_plan(load: Load, *, machines: int = 1) -> LoaderPlan:
    """Return the plan of one loader, as ``inspect`` and ``plan`` would make it, with the given sizes."""
    is_map = not load.loader.startswith("stream")
    inspection = Inspection(
        loader="data",
        kind="map" if is_map else "iterable",
        order="recipe" if is_map else "sequential",
        read_by=load.read_by,
        epoch_length=load.epoch_length if is_map else None,
        claimed_length=None,
        num_loader_workers=load.workers,
        batch_size=1,
        element_bytes=load.element_bytes,
        element_seconds=0.02,
        sampled_elements=8,
        num_streams=load.workers if load.read_by == "workers" else 1,
        versions=Versions(python="3.11"),
    )
    first, largest = load.sizes
    sizes = SegmentSizes(first=first, largest=largest, machines=1 if load.read_by == "workers" else machines)
    return LoaderPlan(
        loader="data",
        units=load.units,
        machines=machines,
        inspection=inspection,
        sizes=sizes,
        source=f"data.py:{load.loader}",
    )


# --- what one process measured --------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What one process saw: when how many elements were there, in unix seconds from its ``started_at``."""

    started_at: float
    steps: list[tuple[int, float]]  # elements so far, at
    cpu_s: float  # of the process and its loader workers
    max_rss_bytes: int
    records: list[ShardRecord] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the start to the last element."""
        return self.steps[-1][1] - self.started_at

    def done_at(self, at: float) -> float:
        """Return how many elements were there at a time, between two steps by proportion."""
        before, since = 0, self.started_at
        for done, until in self.steps:
            if until >= at:
                return before + (done - before) * (at - since) / max(until - since, 1e-9)
            before, since = done, until
        return before

    def rate(self, *, behind: int) -> float:
        """Return elements per second from the first step at or behind element ``behind`` on."""
        begun, since = next(step for step in self.steps if step[0] >= behind)
        done, until = self.steps[-1]
        return (done - begun) / (until - since)


def _used() -> tuple[float, int]:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both), both[0].ru_maxrss * 1024


def iterate(load: Load, folder: Path, start: Start) -> Measured:
    """Iterate the bare loader over as many elements, from ``start`` on; runs in a process of its own."""
    from taas_tasks.prep.opening import open_loader

    folder.mkdir(parents=True)
    (folder / "data.py").write_bytes(LOADERS.read_bytes())
    start.wait(_LIMIT_S)
    before, _ = _used()
    started_at = time.time()
    loader = open_loader(loader_plan(load), folder, folder_store(folder))
    steps, ids = [], []
    elements = iter(loader)
    for done in range(1, load.units + 1):
        ids.append(id_of(next(elements)))
        steps.append((done, time.time()))
    del elements  # ends and reaps the loader workers
    used, rss = _used()
    return Measured(started_at, steps, used - before, rss, ids=ids)


def id_of(element: Any) -> int:
    """Return the sample that an element begins with."""
    found = element[1]
    return int(found) if isinstance(found, int) else int(found.reshape(-1)[0])


def prepare(where: Where, prepared: Prepared, machine: int, folder: Path, start: Start) -> Measured:
    """Prepare one machine's share, from ``start`` on; runs in a process of its own."""
    from taas_tasks.prep.prepare_program import run

    folder.mkdir(parents=True)
    store = open_where(where)
    store.head("none")  # connects: the first request costs an import
    start.wait(_LIMIT_S)
    before, _ = _used()
    started_at = time.time()
    run(prepare_input(where, prepared, machine, folder), store, folder)
    used, rss = _used()
    records = [record for record in records_of(store, prepared.run) if record.machine == machine]
    return Measured(started_at, steps_of(records), used - before, rss, records)


def prepare_input(where: Where, prepared: Prepared, machine: int, folder: Path) -> PrepareInput:
    """Return the input of the program for one machine."""
    from taas_tasks.program_values import PrepareInput

    return PrepareInput(
        store=where if isinstance(where, StoreConfig) else StoreConfig(bucket="none"),
        run=prepared.run,
        run_id=prepared.run,
        project="bench",
        snapshot=prepared.snapshot,
        generation=1,
        host=f"c{machine}",
        host_root=str(folder),
        plan=RunKeys(prepared.run).plan,
        loader="data",
        machine=machine,
    )


def wrong_elements(store: ObjectStore, prepared: Prepared, load: Load) -> str | None:
    """Return what is wrong with the committed elements: which is missing, or is not the loader's own."""
    from taas_tasks.shards.reader import read_lane, read_schema

    found: list[int] = []
    for record in records_of(store, prepared.run):
        data = bytearray(store.get(record.key))
        schema = read_schema(bytes(data[: record.schema_length]))
        for one in record.lanes:
            place = memoryview(data)[one.offset : one.offset + one.length]
            lane = read_lane(place, schema, crc32=one.crc32)
            for row in range(one.num_elements):
                index = lane.index(row) if lane.index(row) < load.units else lane.index(row) - load.units  # padding
                if id_of(lane[row]) != index * load.batch:
                    return f"element {lane.index(row)} holds sample {id_of(lane[row])}"
                found.append(lane.index(row))
    whole = range(load.units + (0 if load.read_by == "workers" else padding_of(load.units)))
    return None if sorted(found) == list(whole) else f"{len(found)} of {len(whole)} elements"


def open_where(where: Where) -> ObjectStore:
    """Return the S3 store of a config, or the store in a folder."""
    return folder_store(where) if isinstance(where, Path) else open_store(where)


def records_of(store: ObjectStore, run: str) -> list[ShardRecord]:
    """Return all records of a run, in the order in which they were committed."""
    infos = store.list(RunKeys(run).ledger("data"))
    found = [ShardRecord.model_validate_json(store.get(info.key)) for info in infos]
    return sorted(found, key=lambda record: record.committed_at)


def steps_of(records: list[ShardRecord]) -> list[tuple[int, float]]:
    """Return how many elements were committed at each commit."""
    done, steps = 0, []
    for record in records:
        done += record.stop - record.start
        steps.append((done, record.committed_at))
    return steps


# --- processes ------------------------------------------------------------------------------------------------------


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "boto3", "benchmarks.delivery.training", "taas_tasks.prep.prepare_program", "taas_tasks.delivery.feeder"]
)


def _act(pipe: Connection, act: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> None:
    multiprocessing.set_start_method("fork", force=True)  # as in a program: a fork server hands its own way down
    try:
        pipe.send((True, act(*given, **named)))
    except BaseException as error:  # told to the parent
        pipe.send((False, f"{type(error).__name__}: {error}"))
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def start_of(count: int) -> Start:
    """Return what so many processes wait for: they start at the same moment, when all are ready."""
    return _context.Barrier(count)


class Running:
    """A function that runs in a process of its own."""

    def __init__(self, act: Callable[..., Any], *given: Any, **named: Any) -> None:
        self._given = given  # a barrier among them ends with its last reference here
        self._pipe, theirs = _context.Pipe(duplex=False)
        self.process = _context.Process(target=_act, args=(theirs, act, given, named))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def result(self, *, timeout_s: float = _LIMIT_S) -> Any:
        """Return what it returned; it has ended then.

        Raises:
            RuntimeError: it raised, was killed or took too long.
        """
        try:
            if not self._pipe.poll(timeout_s):
                raise RuntimeError(f"no result after {timeout_s} s")
            ok, found = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the process was killed") from None
        finally:
            self.end()
        if not ok:
            raise RuntimeError(found)
        return found

    def end(self) -> None:
        """End the process and those it started, if they live."""
        self.process.join(1)
        if self.process.is_alive():
            for pid in [*children_of(self.pid), self.pid]:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            self.process.join(10)
        self._pipe.close()


def warm_up() -> None:
    """Start the fork server, which imports torch."""
    Running(_nothing).result()


def _nothing() -> None:
    """Do nothing."""


# --- the parts by themselves ----------------------------------------------------------------------------------------


def told(argv: list[str], measure: Callable[[Options], Section]) -> int:
    """Run one part of the benchmark by itself: ``[--quick]``; print its lanes, ratios and notes."""
    options_given = argparse.ArgumentParser()
    options_given.add_argument("--quick", action="store_true")
    quick = options_given.parse_args(argv).quick
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends, and the folder goes
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="taas-bench-", dir=memory if memory.is_dir() else None) as name:
        section = measure(Options(quick, 2 if quick else 5, Path("var/bench"), Path(name)))
    for lane in section.lanes:
        more = {key: value for key, value in lane.more.items() if not isinstance(value, list)}
        print(
            f"{lane.name:28} {lane.workload:28} {lane.source:10} {lane.median:10.2f} {lane.unit:10}"
            f" [{min(lane.values):.2f} {max(lane.values):.2f}] {lane.void or ''} {more or ''}"
        )
    print(json.dumps(section.ratios, indent=1))
    print("\n".join(section.notes))
    return 0
