"""How fast one machine prepares a loader beside the bare DataLoader with the same workers, and how machines add up.

    python -m benchmarks.delivery.prep [--quick]

Both read the same elements, in turns. Rates are of the steady state: the bare loader's from the element on at which
preparation has committed its first quarter. The folder stands for a store on another machine: SeaweedFS takes more CPU
for a byte than all of preparation does, and here it takes it from the two cores that load.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.delivery.common import Lane, Options, Section
from benchmarks.delivery.preparing import (
    Load,
    Measured,
    Running,
    Server,
    Where,
    begin_run,
    iterate,
    open_where,
    prepare,
    prepare_input,
    records_of,
    s3_server,
    start_of,
    told,
    warm_up,
    wrong_elements,
)

LOADS = (
    Load("waits_1", 64, workers=1, sizes=(8, 16)),
    Load("waits_4", 224, workers=4, sizes=(16, 32)),
    Load("decodes_1", 64, workers=1, sizes=(8, 16), batch=4, element_bytes=602_112),
    Load("decodes_2", 96, workers=2, sizes=(8, 16), batch=4, element_bytes=602_112),
    Load("large_1", 32, workers=1, sizes=(2, 4), batch=32, element_bytes=4_816_896),
    Load("tiny_2", 1024, workers=2, sizes=(64, 256), element_bytes=3072),
    Load("tiny_batched_2", 512, workers=2, sizes=(32, 64), batch=32, element_bytes=98_304),
    Load("stream_4", 224, workers=4, sizes=(8, 16), read_by="workers"),
    Load("waits_4", 224, workers=4, sizes=(8, 16), read_by="workers"),
)
MACHINES = (1, 2, 4, 8)
_SERVER_REPETITIONS = 3
_FEWEST = 2
_LIMIT_S, _QUICK_LIMIT_S = 240.0, 80.0


class _Bench:
    """What all lanes share."""

    def __init__(self, options: Options, server: Server) -> None:
        self.repetitions = options.repetitions
        self._until = time.monotonic() + (_QUICK_LIMIT_S if options.quick else _LIMIT_S)
        self._scratch = options.scratch / "prep"
        self._server = server
        self._count = 0

    def rounds(self) -> Iterator[int]:
        """Yield the repetitions; two at least, also when a busy machine has used up the time."""
        for repetition in range(self.repetitions):
            if repetition < _FEWEST or time.monotonic() < self._until:
                yield repetition

    def folder(self) -> Path:
        """Return a new folder's path."""
        self._count += 1
        return self._scratch / str(self._count)

    def where(self, source: str) -> Where:
        """Return a new store."""
        return self._server.fresh() if source == "seaweedfs" else self.folder()

    def bare(self, load: Load) -> Measured:
        """Iterate the bare loader."""
        found: Measured = Running(iterate, load, self.folder(), start_of(1)).result()
        return found

    def prepared(self, load: Load, source: str, *, machines: int = 1) -> tuple[list[Measured], str | None]:
        """Prepare on some machines at once; return what each measured, and what is wrong with the elements."""
        where = self.where(source)
        store = open_where(where)
        begun = begin_run(store, load, machines=machines)
        start = start_of(machines)
        running = [Running(prepare, where, begun, m, self.folder(), start) for m in range(machines)]
        try:
            found = [one.result() for one in running]
        finally:
            for one in running:
                one.end()
        return found, wrong_elements(store, begun, load)

    def server_cpu_s(self) -> float:
        """Return the CPU seconds of the server so far."""
        return self._server.cpu_s()


# --- one machine beside the bare loader -----------------------------------------------------------------------------


def _beside_bare(bench: _Bench, load: Load) -> tuple[list[Lane], dict[str, float]]:
    lanes = {source: _lane(load, source) for source in ("bare", "folder", "seaweedfs")}
    server: list[float] = []
    for repetition in bench.rounds():
        for source in _rotated(list(lanes), repetition):
            if source == "seaweedfs" and repetition >= _SERVER_REPETITIONS:
                continue
            before = bench.server_cpu_s()
            if source == "bare":
                one, void = bench.bare(load), None
                void = None if one.ids == [index * load.batch for index in range(load.units)] else "wrong elements"
            else:
                (one,), void = bench.prepared(load, source)
            if source == "seaweedfs":
                server.append(bench.server_cpu_s() - before)
            _take(lanes[source], one, load, void)
    gigabytes = load.units * load.element_bytes / 1e9
    lanes["seaweedfs"].more["server_cpu_s_per_gb"] = statistics.median(server) / gigabytes
    ratios = {source: lanes[source].median / lanes["bare"].median for source in ("folder", "seaweedfs")}
    for source, ratio in ratios.items():
        lanes[source].more["of_bare"] = ratio
        lanes[source].more["of_bare_whole"] = statistics.median(lanes["bare"].more["seconds"]) / statistics.median(
            lanes[source].more["seconds"]
        )
    return list(lanes.values()), ratios


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _lane(load: Load, source: str) -> Lane:
    name = "DataLoader" if source == "bare" else "ours"
    return Lane("prep", name, load.name, source, "elements/s", [], more={"seconds": [], "max_rss_mib": []})


def _take(lane: Lane, one: Measured, load: Load, void: str | None) -> None:
    lane.void = lane.void or void
    lane.values.append(one.rate(behind=load.units // 4))
    lane.cpu_s_per_gb.append(one.cpu_s / (load.units * load.element_bytes / 1e9))
    lane.more["seconds"].append(one.seconds)
    lane.more["max_rss_mib"].append(one.max_rss_bytes >> 20)


# --- several machines -----------------------------------------------------------------------------------------------


def _scaling(bench: _Bench, *, units: int) -> tuple[list[Lane], list[float]]:
    """Measure 1, 2, 4, 8 machines in turns; return the lanes, and the rates of 8 over those of 1."""
    lanes = {
        count: Lane("prep", f"ours, {count} machines", "waits_1", "seaweedfs", "elements/s", []) for count in MACHINES
    }
    for repetition in bench.rounds():
        for place in _rotated([str(count) for count in MACHINES], repetition):
            count = int(place)
            load = Load("waits_1", units * count, workers=1, sizes=(4, 16))
            found, void = bench.prepared(load, "seaweedfs", machines=count)
            rate = together(found)
            lanes[count].void = lanes[count].void or void or (None if rate else "the machines did not run at once")
            lanes[count].values.append(rate or float("nan"))
    ones, eights = lanes[MACHINES[0]].values, lanes[MACHINES[-1]].values
    return list(lanes.values()), [eight / one for one, eight in zip(ones, eights, strict=True)]


def together(machines: list[Measured]) -> float | None:
    """Return elements per second of all machines while each of them was in its steady state."""
    since = max(next(at for done, at in one.steps if done >= one.steps[-1][0] / 4) for one in machines)
    until = min(one.steps[-1][1] for one in machines)
    if until <= since:
        return None
    return sum(one.done_at(until) - one.done_at(since) for one in machines) / (until - since)


# --- the first segment ----------------------------------------------------------------------------------------------


def _first_segment(bench: _Bench, *, repetitions: int) -> Lane:
    """Measure from the start of the real program to the first record in the ledger."""
    lane = Lane("prep", "first committed segment", "waits_1, 32 elements", "seaweedfs", "s", [])
    for _ in range(repetitions):
        where, folder = bench.where("seaweedfs"), bench.folder()
        store = open_where(where)
        begun = begin_run(store, Load("waits_1", 64, workers=1, sizes=(32, 32)))
        folder.mkdir(parents=True)
        (folder / "input.json").write_text(prepare_input(where, begun, 0, folder).model_dump_json())
        started_at = time.time()
        command = [sys.executable, "-m", "taas_tasks.prep.prepare_program", str(folder / "input.json")]
        with (folder / "log").open("wb") as log:
            subprocess.run(command, stdout=log, stderr=log, timeout=120, check=True)
        lane.values.append(records_of(store, begun.run)[0].committed_at - started_at)
    lane.more["of_it_loading"] = 32 * 0.02
    return lane


# --- all ------------------------------------------------------------------------------------------------------------


def run(options: Options) -> Section:
    """Measure preparation; about 4 minutes, a third of it when ``quick``."""
    section = Section()
    with s3_server(options.scratch / "prep-s3") as server:
        warm_up()
        bench = _Bench(options, server)
        ratios: dict[str, dict[str, float]] = {"folder": {}, "seaweedfs": {}}
        for load in LOADS:
            lanes, found = _beside_bare(bench, load.of(0.6) if options.quick else load)
            section.lanes += lanes
            print(f"prep, {load.name}: {found['folder']:.3f} of the bare loader", file=sys.stderr, flush=True)
            for source, ratio in found.items():
                ratios[source][load.name] = ratio
        lanes, eights = _scaling(bench, units=64)
        section.lanes += [*lanes, _first_segment(bench, repetitions=1 if options.quick else 3)]
    section.ratios = {
        "prep_efficiency": statistics.median(ratios["folder"].values()),
        "prep_efficiency_by_loader": ratios["folder"],
        "prep_efficiency_beside_its_server": ratios["seaweedfs"],
        "prep_scaling_8": statistics.median(eights),
    }
    section.notes = _notes(section)
    return section


def _notes(section: Section) -> list[str]:
    worst = min(section.ratios["prep_efficiency_by_loader"].items(), key=lambda one: one[1])
    first = next(lane for lane in section.lanes if lane.name == "first committed segment")
    server = [lane.more["server_cpu_s_per_gb"] for lane in section.lanes if "server_cpu_s_per_gb" in lane.more]
    fewest = min(len(lane.values) for lane in section.lanes if lane.source in ("bare", "folder"))
    return [
        f"prep: {section.ratios['prep_efficiency']:.3f} of the bare DataLoader (target 0.95), the worst loader is"
        f" {worst[0]} with {worst[1]:.3f}; {fewest} repetitions",
        f"prep: 8 machines are {section.ratios['prep_scaling_8']:.2f} times one (target 7.5)",
        f"prep: the first segment is committed {first.median:.2f} s after the program's start, "
        f"{first.more['of_it_loading']:.2f} s of it its elements",
        f"prep: SeaweedFS takes {min(server):.0f} to {max(server):.0f} CPU s/GB of the same cores; a c1.4 has 4 of its"
        " own, and its store another machine's",
    ]


if __name__ == "__main__":
    raise SystemExit(told(sys.argv[1:], run))
