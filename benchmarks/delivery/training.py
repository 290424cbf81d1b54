"""A feeder and ranks in processes of their own, for the lanes that measure delivery together with preparation."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.delivery.preparing import Prepared, Running, id_of
from taas_tasks.values import LaunchPlan, StoreConfig


@dataclass(frozen=True)
class Host:
    """One host's plan and folders."""

    plan: LaunchPlan
    folder: Path

    @property
    def socket(self) -> str:
        return str(self.folder / "s")

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def counters(self) -> Path:
        return self.folder / "counters"


@dataclass
class Trained:
    """What one rank saw. Times in unix seconds; ``waits_s``: of each step, in ``next``."""

    first_at: float = 0.0
    ended_at: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    pass_ends: list[float] = field(default_factory=list)
    num_tensors: int = 0
    num_in_cache: int = 0  # tensors whose memory is the mapped cache file itself


@contextmanager
def a_host(prepared: Prepared, config: StoreConfig, folder: Path, *, ranks: int, cache_bytes: int) -> Iterator[Host]:
    """A host whose feeder runs; it is gone at the end."""
    host = Host(_launch_plan(prepared, ranks, cache_bytes), folder)
    host.counters.mkdir(parents=True)
    given = {
        "store": config.model_dump(mode="json"),
        "launch_plan": host.plan.model_dump(mode="json"),
        "node_rank": 0,
        "socket": host.socket,
        "cache_dir": str(host.cache),
        "stats_path": str(folder / "stats.json"),
    }
    feeder = Running(feed, given, folder)
    try:
        (folder / "feeder.pid").write_text(str(feeder.pid))
        yield host
        feeder.send(signal.SIGTERM)
        feeder.result(timeout_s=20)
    finally:
        feeder.end()


def feeder_pid(host: Host) -> int:
    """Return the process of a host's feeder."""
    return int((host.folder / "feeder.pid").read_text())


def _launch_plan(prepared: Prepared, ranks: int, cache_bytes: int) -> LaunchPlan:
    plan = prepared.plan
    return LaunchPlan(
        run=plan.run,
        run_id=plan.run_id,
        project=plan.project,
        snapshot=plan.snapshot,
        generation=1,
        nnodes=1,
        nproc_per_node=ranks,
        flavor=plan.flavor,
        emulate_gpus=True,
        loaders=plan.loaders,
        seed=plan.seed,
        cache_bytes=cache_bytes,
    )


def feed(given: dict[str, Any], folder: Path) -> int:
    """Be the feeder; runs in a process of its own."""
    import json

    from taas_tasks.delivery.feeder import main

    path = folder / "feeder.json"
    path.write_text(json.dumps(given))
    return main([str(path)])


def train(host: Host, rank: int, *, passes: int, step_s: float) -> Trained:
    """Take all elements of some passes, with a pause as long as a training step; runs in a process of its own."""
    import torch

    from taas_tasks.delivery.loader import DeliveredLoader, Delivery

    world_size = host.plan.world_size
    delivery = Delivery(rank, world_size, host.socket, host.counters, group_size=lambda: world_size)
    loader = DeliveredLoader(host.plan.loaders["data"], delivery)
    found = Trained()
    mapped = _Mapped(host.cache)
    for _ in range(passes):
        asked = time.perf_counter()
        for element in loader:
            found.waits_s.append(time.perf_counter() - asked)
            found.first_at = found.first_at or time.time()
            found.ids.append(id_of(element))
            if len(found.ids) % 8 == 1:
                tensors = [leaf for leaf in element if isinstance(leaf, torch.Tensor)]
                found.num_tensors += len(tensors)
                found.num_in_cache += sum(mapped.holds(tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
            time.sleep(step_s)
            asked = time.perf_counter()
        found.pass_ends.append(time.time())
    found.ended_at = time.time()
    return found


class _Mapped:
    """Which addresses of this process are cache files."""

    def __init__(self, cache: Path) -> None:
        self._cache = str(cache)

    def holds(self, address: int, num_bytes: int) -> bool:
        """Return whether a piece of memory lies in one mapping of a cache file."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            bounds, *_, path = line.split(maxsplit=5) if line.count(" ") > 4 else (line, "")
            start, stop = (int(bound, 16) for bound in bounds.split()[0].split("-"))
            if start <= address and address + num_bytes <= stop:
                return path.strip().startswith(self._cache)
        return False


def cache_files(pid: int, cache: Path) -> dict[int, int]:
    """Return the cache files that a process holds open or maps: inode -> bytes."""
    found: dict[int, int] = {}
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if str(link.readlink()).startswith(str(cache)):
                about = link.stat()
                found[about.st_ino] = about.st_blocks * 512
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if str(cache) in line:
                start, stop, inode = re.match(r"(\w+)-(\w+) \S+ \S+ \S+ (\d+)", line).groups()  # type: ignore[union-attr]
                found.setdefault(int(inode), int(stop, 16) - int(start, 16))  # the feeder maps more than is allocated
    except OSError:  # it has ended, or closed a file meanwhile
        pass
    return found
