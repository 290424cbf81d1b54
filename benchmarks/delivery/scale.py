"""The seed's own numbers, ``units: 20480000, gpus: 32, cpus: 8``: seconds and memory of all that grows with the units.

    .venv/bin/python -m benchmarks.delivery.scale [--quick]

Measured for two sizes of elements (the plan makes few segments of tiny ones, the most it ever makes of images) and two
ways of reading (by index; by 8 loader workers, that is a merge of 8 streams). The ledger is simulated: records are made
up as they are asked for, so no time of a real store is in here; requests are counted instead.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.delivery.common import Lane, Options, Section
from benchmarks.delivery.simulated import (
    ELEMENT_BYTES,
    GPUS,
    LOADER,
    RUN,
    UNITS,
    inspection,
    planned,
    put_training,
    store_of,
)
from taas.flavors import FLAVORS
from taas_tasks.airflow.gate_watch import GateWatch
from taas_tasks.delivery.desk import Desk
from taas_tasks.delivery.parts import Ranks, Segment
from taas_tasks.ledger_reader import LedgerReader
from taas_tasks.plan import describe, owner_of, segment_bounds
from taas_tasks.report import as_text, build_report, collect
from taas_tasks.values import LoaderPlan, Plan

_LIMIT_S = 300.0
_POLLS = 20
_SHARES = (0.0, 0.5, 0.99)
_PASSES = 10
_LONG_REPETITIONS = 3  # of what takes many seconds


@dataclass
class Cost:
    """What one measurement in a process of its own took. ``peak_mib``: memory beyond what it began with."""

    seconds: float
    peak_mib: float
    more: dict[str, Any] = field(default_factory=dict)


# --- one measurement in one process ---------------------------------------------------------------------------------


def _status_kib(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def _child(measure: Callable[[], dict[str, Any]], answer: Connection) -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the parent's peak
        before = _status_kib("VmRSS")
        began = time.process_time(), time.perf_counter()
        more = measure()
        cpu_s, seconds = time.process_time() - began[0], time.perf_counter() - began[1]
        peak = (_status_kib("VmHWM") - before) / 1024
        answer.send(Cost(more.pop("seconds", seconds), max(0.0, peak), {"cpu_s": cpu_s, **more}))
    except BaseException:
        answer.send(traceback.format_exc())
        raise


def _measured(measure: Callable[[], dict[str, Any]], *, repetitions: int) -> list[Cost]:
    return [_in_process(measure) for _ in range(repetitions)]


def _in_process(measure: Callable[[], dict[str, Any]]) -> Cost:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(measure, theirs))
    child.start()
    theirs.close()
    try:
        if not mine.poll(_LIMIT_S):
            raise TimeoutError(f"a measurement took more than {_LIMIT_S:.0f} s")
        found = mine.recv()
    finally:
        child.join(5)
        if child.is_alive():
            child.kill()
            child.join()
    if isinstance(found, Cost):
        return found
    raise RuntimeError(found)


# --- what is measured -----------------------------------------------------------------------------------------------


def _make_plan(read_by: str, elements: str) -> dict[str, Any]:
    found = inspection(read_by=read_by, elements=elements)
    plan = planned(found)
    text = describe(plan, FLAVORS)
    return {"segments": store_of(plan).num_segments, "sizes": plan.loaders[LOADER].sizes.model_dump(), "text": text}


def _fold(plan: Plan) -> dict[str, Any]:
    store = store_of(plan)
    store.commit(1.0)
    reader = LedgerReader(store, RUN, plan.loaders[LOADER])
    while reader.poll(enough=256):
        pass
    if not reader.watermark.complete or reader.watermark.units != UNITS:
        raise RuntimeError(f"the whole ledger adds up to {reader.watermark}")
    return {"requests": store.requests, "segments": store.num_segments}


def _catch_up(plan: Plan) -> dict[str, Any]:
    store = store_of(plan)
    store.commit(1.0)
    reader = LedgerReader(store, RUN, plan.loaders[LOADER])
    reader.catch_up()
    if not reader.is_complete:
        raise RuntimeError(f"the whole ledger adds up to {reader.watermark}")
    return {"requests": store.requests, "segments": store.num_segments}


def _gate(plan: Plan, share: float, *, new: int) -> dict[str, Any]:
    """Look at a ledger of which a share is there, with ``new`` segments between one look and the next."""
    store = store_of(plan)
    store.commit(share)
    watch = GateWatch.of_run(store, RUN)
    watch.look()
    before, seconds = store.requests, 0.0
    for _ in range(_POLLS):
        store.commit_more(new)
        began = time.perf_counter()
        watch.look()
        seconds += time.perf_counter() - began
    return {"seconds": seconds / _POLLS, "requests": (store.requests - before) / _POLLS, "new": new}


def _account(plan: Plan) -> dict[str, Any]:
    store = store_of(plan)
    store.commit(1.0)
    put_training(store, num_passes=_PASSES)
    began = time.perf_counter()
    facts = collect(store, RUN, run_id=RUN)
    read_s = time.perf_counter() - began
    report = build_report(facts, flavors=FLAVORS)
    account = report.loaders[LOADER]
    if not account.explained or (account.consumed, account.replayed) != (_PASSES * UNITS, (_PASSES - 1) * UNITS):
        raise RuntimeError(f"the books do not close: {account}")
    text = as_text(report)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "reading_s": read_s, "accounts_s": seconds - read_s, "text_bytes": len(text)}


def _desk(plan: Plan) -> dict[str, Any]:
    """Let a host of 8 ranks know the whole ledger, then decide with all of them somewhere in it."""
    loader = plan.loaders[LOADER]
    store = store_of(plan)
    store.commit(1.0)
    desk = Desk(Ranks(0, 8, GPUS), plan.loaders, cache_bytes=64 << 30, host="h", max_fetches=4)
    added_s, num = 0.0, 0
    for record in store.records():
        began = time.process_time()
        desk.add_segment(Segment.of(record, num_streams=loader.num_streams))
        added_s, num = added_s + time.process_time() - began, num + 1
    more: dict[str, Any] = {"seconds": added_s, "add_us": 1e6 * added_s / num, "segments": num}
    for share in _SHARES:
        more[f"decide_ms_at_{share:.0%}"] = 1e3 * sum(_decide(desk, loader, share) for _ in range(_POLLS)) / _POLLS
    return more


def _decide(desk: Desk, loader: LoaderPlan, share: float) -> float:
    """Let 8 ranks begin somewhere; return the seconds of what the desk decides of it."""
    index = int(share * UNITS) // GPUS * GPUS
    for rank in range(8):
        position, stream = divmod(index + rank, loader.num_streams)
        asks = [(0, 1, stream, position, 0)]
        desk.open(rank, loader=LOADER, epoch=0, offset=0, index=index + rank, asks=asks)
    began = time.process_time()
    desk.decide()
    seconds = time.process_time() - began
    for rank in range(8):
        desk.close(rank)
    return seconds


class _Numbers:
    """A dataset of the run's length; nothing is loaded from it."""

    def __len__(self) -> int:
        return UNITS


def _order(plan: Plan, epochs: int) -> dict[str, Any]:
    """Compute the first segment of machine 7 in each epoch of a shuffled loader of single samples."""
    from torch.utils.data import DataLoader

    from taas_tasks.prep.order import RecipeOrder

    order = RecipeOrder(DataLoader(_Numbers(), batch_size=1, shuffle=True, num_workers=2), seed=1)  # type: ignore[arg-type]
    sizes = plan.loaders[LOADER].sizes
    taken, first_s, later_s = 0, 0.0, 0.0
    for epoch in range(epochs):
        n = next(n for n in range(sizes.machines) if owner_of(epoch, n, machines=sizes.machines) == 7)
        began = time.perf_counter()
        taken += len(order.rows(epoch, *segment_bounds(sizes, n)))
        first_s += time.perf_counter() - began
        began = time.perf_counter()
        for later in range(n + sizes.machines, n + 9 * sizes.machines, sizes.machines):
            order.rows(epoch, *segment_bounds(sizes, later))
        later_s += time.perf_counter() - began
    return {"rows": taken, "first_s_per_epoch": first_s / epochs, "later_ms_per_segment": 1e3 * later_s / epochs / 8}


# --- the section ----------------------------------------------------------------------------------------------------


def _lanes(name: str, workload: str, costs: list[Cost], *, unit: str = "s") -> list[Lane]:
    factor = 1e3 if unit == "ms" else 1.0
    more = {key: value for key, value in costs[-1].more.items() if key != "text"}
    return [
        Lane("scale", name, workload, "simulated", unit, [factor * one.seconds for one in costs], more=more),
        Lane("scale", f"{name}: memory", workload, "simulated", "MiB", [one.peak_mib for one in costs]),
    ]


def _of_workload(read_by: str, elements: str, *, repetitions: int) -> Section:
    plan = planned(inspection(read_by=read_by, elements=elements))
    workload = f"{elements}, {'8 streams' if read_by == 'workers' else 'by index'}"
    section = Section()

    def add(name: str, measure: Callable[[], dict[str, Any]], *, unit: str = "s", at_most: int = 99) -> None:
        costs = _measured(measure, repetitions=min(at_most, repetitions))
        section.lanes += _lanes(name, workload, costs, unit=unit)

    add("plan and describe", lambda: _make_plan(read_by, elements))
    add("reading the whole ledger", lambda: _fold(plan), at_most=_LONG_REPETITIONS)
    add("catching up by a listing", lambda: _catch_up(plan))
    for share in _SHARES:
        add(f"gate poll at {share:.0%}, nothing new", lambda share=share: _gate(plan, share, new=0), unit="ms")  # type: ignore[misc]
    add("gate poll at 50%, 8 new segments", lambda: _gate(plan, 0.5, new=8), unit="ms")
    add(f"accounts and report, {GPUS} ranks x {_PASSES} passes", lambda: _account(plan), at_most=_LONG_REPETITIONS)
    add("the desk of a host, whole ledger (CPU)", lambda: _desk(plan), at_most=_LONG_REPETITIONS)
    return section


def run(options: Options) -> Section:
    """Measure all of it; every measurement in a process of its own, ``options.repetitions`` times."""
    section = Section()
    for elements in ELEMENT_BYTES:
        for read_by in ("index", "workers"):
            found = _of_workload(read_by, elements, repetitions=options.repetitions)
            section.lanes += found.lanes
    plan = planned(inspection(read_by="index", elements="tiny"))
    for epochs in (1, 3):
        costs = _measured(lambda epochs=epochs: _order(plan, epochs), repetitions=options.repetitions)  # type: ignore[misc]
        section.lanes += _lanes(f"shuffled order of {epochs} epoch(s), machine 7", "batch 1", costs)
    section.notes.append(_verdict(section))
    return section


def _verdict(section: Section) -> str:
    polls = [lane for lane in section.lanes if lane.name.startswith("gate poll") and lane.unit == "ms"]
    worst = max(polls, key=lambda lane: lane.median)
    largest = max((lane for lane in section.lanes if lane.unit == "MiB"), key=lambda lane: lane.median)
    return (
        f"{UNITS:,} units on {GPUS} GPUs: the slowest gate poll takes {worst.median:.1f} ms ({worst.name};"
        f" {worst.workload}), the most memory is {largest.median:.0f} MiB ({largest.name}; {largest.workload})"
    )


def main(argv: list[str]) -> int:
    """Print the section as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repetition")
    quick = parser.parse_args(argv).quick
    options = Options(quick=quick, repetitions=1 if quick else 5, out=Path("var/bench"), scratch=Path("var/bench"))
    section = run(options)
    for lane in section.lanes:
        more = {key: round(value, 4) if isinstance(value, float) else value for key, value in lane.more.items()}
        sys.stdout.write(f"{lane.workload:18} {lane.name:48} {lane.median:10.3f} {lane.unit:4} {more or ''}\n")
    sys.stdout.write("\n".join(section.notes) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
