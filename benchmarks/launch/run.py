"""The part of the benchmark that runs on a cluster."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.launch import cases
from benchmarks.launch.lanes import LAUNCHERS, Lane, rotated, table
from benchmarks.launch.launchers import Launch, Operator, Taas, Torchrun, Wanted
from benchmarks.launch.world import RANKS_PER_HOST, World, running

SIZES, QUICK_SIZES = (1, 2, 4), (1, 2)
FAULT_HOSTS = 2
CASES = ("start", *cases.CASES)


@dataclass
class ClusterBench:
    """All lanes, and what they were measured with."""

    repetitions: int
    sizes: tuple[int, ...] = SIZES
    bounds: cases.Bounds = field(default_factory=cases.Bounds)
    launchers: tuple[str, ...] = LAUNCHERS
    cases: tuple[str, ...] = CASES
    lanes: dict[tuple[str, int, str], Lane] = field(default_factory=dict)

    def lane(self, case: str, hosts: int, launcher: str) -> Lane:
        """Return the lane, a new one at first."""
        return self.lanes.setdefault((case, hosts, launcher), Lane(case, launcher, hosts))

    def as_json(self) -> dict[str, Any]:
        """Return everything."""
        return {
            "repetitions": self.repetitions,
            "sizes": self.sizes,
            "ranks_per_host": RANKS_PER_HOST,
            "bounds_s": {"fault": self.bounds.fault_s, "left": self.bounds.left_s},
            "lanes": [lane.as_json() for lane in self.lanes.values()],
        }

    def table(self) -> str:
        """Return the table."""
        return table(list(self.lanes.values()))

    @property
    def is_well(self) -> bool:
        """Whether no lane is void."""
        return not any(lane.void for lane in self.lanes.values())


def run(bench: ClusterBench, keep: Callable[[], None]) -> None:
    """Fill the lanes; ``keep`` is called after each launch, so that what was measured is never lost."""
    with tempfile.TemporaryDirectory(prefix="taas-bench-cluster-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL runs as another user when we are root
        with running(folder, num_hosts=max(bench.sizes)) as world:
            _warm_up(bench, world, folder)
            for repetition in range(bench.repetitions):
                _repeat(bench, world, folder, repetition, keep)


def _warm_up(bench: ClusterBench, world: World, folder: Path) -> None:
    """Launch once on all hosts by each launcher: the engine gets there, and files are in memory."""
    for launcher in bench.launchers:
        scratch = Lane("warm-up", launcher, max(bench.sizes))
        _launch(world, folder, bench.bounds, scratch, cases.start, _wanted(f"bench-w-{launcher}", max(bench.sizes)))
        for why in scratch.void:
            print(f"warm-up by {launcher}: {why}", file=sys.stderr, flush=True)


def _repeat(bench: ClusterBench, world: World, folder: Path, repetition: int, keep: Callable[[], None]) -> None:
    todo: list[tuple[str, int, cases.Case]] = [
        *(("start", size, cases.start) for size in bench.sizes),
        *((name, FAULT_HOSTS, case) for name, case in cases.CASES.items()),
    ]
    todo = [one for one in todo if one[0] in bench.cases]
    for place, (name, size, case) in enumerate(todo):
        for launcher in rotated(_useful(bench.launchers, case), repetition + place):
            mark = f"bench-{repetition}-{name.replace(' ', '-')}-{size}-{launcher}"
            wanted = _wanted(mark, size)
            if case is not cases.start:
                wanted = replace(wanted, num_steps=cases.ENDLESS, pause_s=cases.PAUSE_S)
            if case is cases.restart:
                wanted = replace(wanted, max_restarts=1)
            lane = bench.lane(name, size, launcher)
            lane.loads.append(os.getloadavg()[0])
            began = time.monotonic()
            _launch(world, folder, bench.bounds, lane, case, wanted)
            print(f"{mark}: {time.monotonic() - began:.0f} s, {lane.values} {lane.void}", file=sys.stderr, flush=True)
            keep()


def _useful(launchers: Sequence[str], case: cases.Case) -> list[str]:
    """Return the launchers of a case; below the operator it is torchrun that restarts, and that is a lane already."""
    return [name for name in launchers if not (case is cases.restart and name == "operator")]


def _wanted(mark: str, size: int) -> Wanted:
    return Wanted(mark, size, num_steps=cases.NUM_STEPS, pause_s=0)


def _launch(world: World, folder: Path, bounds: cases.Bounds, lane: Lane, case: cases.Case, wanted: Wanted) -> None:
    launch = _make(lane.launcher, world, wanted, folder)
    try:
        case(world, launch, lane, bounds)
    except Exception as error:  # noqa: BLE001 (one lane's failure is told in the table; the others go on)
        lane.void.append(f"{type(error).__name__}: {str(error)[:1500]}")
    finally:
        _end(world, launch)


def _make(name: str, world: World, wanted: Wanted, folder: Path) -> Launch:
    if name == "torchrun":
        return Torchrun(world, wanted, folder=folder)
    return {"taas": Taas, "operator": Operator}[name](world, wanted)


def _end(world: World, launch: Launch) -> None:
    """Leave the hosts as the next launch must find them."""
    try:
        if not launch.is_over:
            launch.cancel()
    finally:
        launch.close()
        world.end(launch.wanted.mark)
