"""Memory over ten epochs of preparation, feeder and ranks; what the cache holds; whether an element is ever copied.

    python -m benchmarks.delivery.memory [--quick]

Memory is the resident set (a share of the pages that processes have in common would change when another one ends). The
cache is what its files hold that the feeder keeps, each once; and with those that only ranks still map, as the loop
holds an element of theirs.
"""

from __future__ import annotations

import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.delivery.common import Lane, Options, Section
from benchmarks.delivery.preparing import (
    Load,
    Measured,
    Running,
    begin_run,
    children_of,
    open_where,
    prepare,
    s3_server,
    start_of,
    told,
    warm_up,
)
from benchmarks.delivery.training import Host, Trained, a_host, cache_files, feeder_pid, train

EPOCHS = 10
RANKS = 2
CACHE_BYTES = 32 << 20
_EVERY_S = 0.1
_MIB = 1 << 20
_FLAT = 1.05  # of the second epoch: the first one imports, opens and fills


@dataclass
class _Watch:
    """Samples of the memory of some processes, taken by a thread: (unix seconds, bytes)."""

    pids: dict[str, Callable[[], list[int]]]
    cache: Path | None = None
    samples: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    cache_bytes: list[int] = field(default_factory=list)  # of the files that the feeder keeps
    with_ranks_bytes: list[int] = field(default_factory=list)  # and of those that ranks alone still map

    def __enter__(self) -> _Watch:
        self.samples = {name: [] for name in self.pids}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            for name, pids in self.pids.items():
                self.samples[name].append((time.time(), sum(resident_bytes(pid) for pid in pids())))
            if self.cache is not None:
                self._look_at_cache(self.cache)

    def _look_at_cache(self, cache: Path) -> None:
        held = {name: [cache_files(pid, cache) for pid in pids()] for name, pids in self.pids.items()}
        kept = held["feeder"][0]
        mapped = {inode: size for files in held.values() for one in files for inode, size in one.items()}
        self.cache_bytes.append(sum(kept.values()))
        self.with_ranks_bytes.append(sum((mapped | kept).values()))


def resident_bytes(pid: int) -> int:
    """Return the resident set of a process; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def by_epoch(samples: list[tuple[float, int]], ends: list[float]) -> list[float]:
    """Return the median MiB of each epoch, which ends at the given times."""
    found, since = [], 0.0
    for end in ends:
        within = [value / _MIB for at, value in samples if since < at <= end and value > 0]
        found += [statistics.median(within)] if within else []
        since = end
    return found


def slope(values: list[float]) -> float:
    """Return the change per epoch, by least squares, from the second epoch on."""
    after = values[1:]
    middle, mean = (len(after) - 1) / 2, statistics.fmean(after)
    spread = sum((n - middle) ** 2 for n in range(len(after)))
    return sum((n - middle) * (value - mean) for n, value in enumerate(after)) / spread if spread else 0.0


def _lane(who: str, epochs: list[float], load: Load, source: str) -> Lane:
    growth = epochs[-1] / epochs[1] if len(epochs) > 1 else float("nan")
    more = {"slope_mib_per_epoch": slope(epochs), "last_of_second": growth, "is_flat": growth <= _FLAT}
    return Lane("memory", who, f"{load.loader}, {EPOCHS} epochs", source, "MiB", epochs, more=more)


def run(options: Options) -> Section:
    """Prepare ten epochs, then train on them; about a minute, a third of it when ``quick``."""
    length = 32 if options.quick else 96
    load = Load(
        f"cheap_{length}", length * EPOCHS, workers=1, sizes=(4, 8), batch=4, element_bytes=602_112, epochs=EPOCHS
    )
    scratch = options.scratch / "memory"
    with s3_server(options.scratch / "memory-s3") as server:
        warm_up()
        config = server.fresh()
        begun = begin_run(open_where(config), load)
        preparing = Running(prepare, config, begun, 0, scratch / "prep", start_of(1))
        with _Watch({"prep": lambda: [preparing.pid, *children_of(preparing.pid)]}) as seen:
            prepared: Measured = preparing.result()
        section = Section(lanes=[_lane("prep and its loader worker", _prep_epochs(seen, prepared), load, "seaweedfs")])
        with a_host(begun, config, scratch / "host", ranks=RANKS, cache_bytes=CACHE_BYTES) as host:
            _train(section, host, load)
    return section


def _prep_epochs(seen: _Watch, prepared: Measured) -> list[float]:
    ends = {record.epoch: record.committed_at for record in prepared.records}
    return by_epoch(seen.samples["prep"], [ends[epoch] for epoch in sorted(ends)])


def _train(section: Section, host: Host, load: Load) -> None:
    running = [Running(train, host, rank, passes=EPOCHS, step_s=0.01) for rank in range(RANKS)]
    pids: dict[str, Callable[[], list[int]]] = {"feeder": lambda: [feeder_pid(host)]}
    pids |= {f"rank {rank}": lambda one=one: [one.pid] for rank, one in enumerate(running)}  # type: ignore[misc]
    with _Watch(pids, host.cache) as seen:
        try:
            trained: list[Trained] = [one.result() for one in running]
        finally:
            for one in running:
                one.end()
    for who, samples in seen.samples.items():
        ends = trained[0].pass_ends if who == "feeder" else trained[int(who[-1])].pass_ends
        section.lanes.append(_lane(who, by_epoch(samples, ends), load, "seaweedfs"))
    for rank, seen_by_rank in enumerate(trained):
        wrong = seen_by_rank.ids != [
            n * load.batch for _ in range(EPOCHS) for n in range(rank, load.epoch_length, RANKS)
        ]
        section.lanes[-RANKS + rank].void = "other elements, or another order" if wrong else None
    section.notes = _notes(section, seen, trained, load)
    section.ratios = {
        "memory_flat": max(lane.more["last_of_second"] for lane in section.lanes),
        "cache_of_limit": max(seen.cache_bytes) / CACHE_BYTES,
        "tensors_without_a_copy": sum(one.num_in_cache for one in trained) / sum(one.num_tensors for one in trained),
    }


def _notes(section: Section, seen: _Watch, trained: list[Trained], load: Load) -> list[str]:
    flat = ", ".join(
        f"{lane.name} {lane.values[1]:.0f} -> {lane.values[-1]:.0f} MiB"
        f" ({lane.more['slope_mib_per_epoch']:+.2f} an epoch)"
        for lane in section.lanes
    )
    kept, mapped = max(seen.cache_bytes) / _MIB, max(seen.with_ranks_bytes) / _MIB
    data = load.units * load.element_bytes / _MIB
    tensors, in_cache = sum(one.num_tensors for one in trained), sum(one.num_in_cache for one in trained)
    return [
        f"memory, second to last of {EPOCHS} epochs: {flat}",
        f"memory: the cache kept at most {kept:.1f} MiB of the {CACHE_BYTES / _MIB:.0f} allowed, {mapped:.1f} with what"
        f" ranks still mapped; {data:.0f} MiB went through it",
        f"memory: {in_cache} of {tensors} tensors looked at lie in the mapped cache file itself",
    ]


if __name__ == "__main__":
    raise SystemExit(told(sys.argv[1:], run))
