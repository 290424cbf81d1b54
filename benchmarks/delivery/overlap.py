"""Preparation and training at once, against the longer of the two alone.

    python -m benchmarks.delivery.overlap [--quick]

One machine prepares a latency-bound loader at its rate P while two ranks, fed by the real feeder, take elements at
C = P/2, P, 2P (they sleep at each step). All times count from the first committed segment or the first step on; what
comes before, the fixed start, is told apart. A segment is under 2 % of the run, as 48 MiB are of a real one.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.delivery.common import Lane, Options, Section
from benchmarks.delivery.preparing import (
    Load,
    Measured,
    Running,
    Server,
    begin_run,
    open_where,
    prepare,
    s3_server,
    start_of,
    told,
    warm_up,
)
from benchmarks.delivery.training import Trained, a_host, train
from taas_tasks.values import StoreConfig

RANKS = 2
PACES = {"P/2": 0.5, "P": 1.0, "2P": 2.0}
_CACHE_BYTES = 256 << 20
_LIMIT_S = 80.0  # no repetition is begun behind it


@dataclass
class _Found:
    """What was measured at one pace, a value per repetition."""

    makespan_s: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    fixed_start_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)  # of the rank that waited longest, behind its first step
    void: str | None = None


class _Bench:
    def __init__(self, options: Options, server: Server, load: Load) -> None:
        self._scratch = options.scratch / "overlap"
        self._server = server
        self._load = load
        self._count = 0

    def _folder(self) -> Path:
        self._count += 1
        return self._scratch / str(self._count)

    def prepare_alone(self) -> tuple[StoreConfig, Measured]:
        """Prepare; return where, and what was measured."""
        config = self._server.fresh()
        begun = begin_run(open_where(config), self._load)
        self._last = begun
        found: Measured = Running(prepare, config, begun, 0, self._folder(), start_of(1)).result()
        return config, found

    def train_alone(self, config: StoreConfig, *, rate: float) -> list[Trained]:
        """Train on what was prepared last."""
        with a_host(self._last, config, self._folder(), ranks=RANKS, cache_bytes=_CACHE_BYTES) as host:
            running = [Running(train, host, rank, passes=1, step_s=RANKS / rate) for rank in range(RANKS)]
            return _results(running)

    def together(self, *, rate: float) -> tuple[float, list[Trained]]:
        """Prepare and train at once; return when preparation started, and what the ranks measured."""
        config = self._server.fresh()
        begun = begin_run(open_where(config), self._load)
        with a_host(begun, config, self._folder(), ranks=RANKS, cache_bytes=_CACHE_BYTES) as host:
            running = [Running(train, host, rank, passes=1, step_s=RANKS / rate) for rank in range(RANKS)]
            preparing = Running(prepare, config, begun, 0, self._folder(), start_of(1))
            try:
                trained = _results(running)
                prepared: Measured = preparing.result()
            finally:
                preparing.end()
        return prepared.started_at, trained


def _results(running: list[Running]) -> list[Trained]:
    try:
        return [one.result() for one in running]
    finally:
        for one in running:
            one.end()


def _measure(bench: _Bench, found: dict[str, _Found], units: int) -> float:
    """Measure each pace once; return the rate of preparation alone."""
    config, alone = bench.prepare_alone()
    rate = alone.rate(behind=units // 8)
    prepare_s = alone.steps[-1][1] - alone.steps[0][1]
    for name, share in PACES.items():
        apart = bench.train_alone(config, rate=rate * share)
        train_s = max(one.ended_at for one in apart) - min(one.first_at for one in apart)
        started_at, trained = bench.together(rate=rate * share)
        first_at = min(one.first_at for one in trained)
        ended_at = max(one.ended_at for one in trained)
        here = found[name]
        here.makespan_s.append(ended_at - started_at)
        here.ratio.append((ended_at - first_at) / max(prepare_s, train_s))
        here.fixed_start_s.append(first_at - started_at)
        here.stall_s.append(max(sum(one.waits_s[1:]) for one in trained))
        here.void = here.void or _wrong(trained, units)
    return rate


def _wrong(trained: list[Trained], units: int) -> str | None:
    for rank, one in enumerate(trained):
        if one.ids != list(range(rank, units, RANKS)):
            return f"rank {rank} took other elements, or another order"
    return None


def run(options: Options) -> Section:
    """Measure the overlap; about 2 minutes, a third of it when ``quick``."""
    units = 128 if options.quick else 224
    repetitions = 1 if options.quick else 3
    load = Load("waits_1", units, workers=1, sizes=(2, 4))
    found = {name: _Found() for name in PACES}
    with s3_server(options.scratch / "overlap-s3") as server:
        warm_up()
        bench = _Bench(options, server, load)
        until, rates = time.monotonic() + _LIMIT_S, [_measure(bench, found, units)]
        while len(rates) < repetitions and time.monotonic() < until:
            rates.append(_measure(bench, found, units))
    lanes = [_lane(name, one) for name, one in found.items()]
    worst = max(lane.median for lane in lanes)
    start = statistics.median(value for one in found.values() for value in one.fixed_start_s)
    stalls = ", ".join(f"{name} {statistics.median(one.stall_s):.2f} s" for name, one in found.items())
    notes = [
        f"overlap: {worst:.3f} of the longer of preparing and training alone at the worst of three paces (target 1.05),"
        f" beyond a fixed start of {start:.2f} s; P is {statistics.median(rates):.1f} elements/s;"
        f" {len(rates)} repetition(s)",
        f"overlap: the rank that waited longest waited behind its first step: {stalls}",
    ]
    return Section(lanes, {"overlap": worst}, notes)


def _lane(pace: str, found: _Found) -> Lane:
    medians = {
        name: statistics.median(values)
        for name, values in vars(found).items()
        if name not in ("ratio", "void")  # the lane's own
    }
    return Lane("overlap", f"C = {pace}", "waits_1", "seaweedfs", "of max", found.ratio, void=found.void, more=medians)


if __name__ == "__main__":
    raise SystemExit(told(sys.argv[1:], run))
