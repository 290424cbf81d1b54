"""The lanes: what each runs, with which settings, and the order that it owes."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.delivery import checks, prepared
from benchmarks.delivery.servers import Source
from benchmarks.delivery.workloads import BATCH, WORKLOADS
from taas_tasks.delivery.feeder import _MAX_FETCHES as FETCHES
from taas_tasks.store import open_store

SHARDS = 4  # of a peer's dataset, one for each of two loader workers of a rank: with 8 or 16 all peers are slower
RANKS = 2
EPOCHS = 8  # what is steady: connecting, and filling memory for the first time, are a small part
LONG_BYTES = prepared.CACHE_BYTES  # of a local cache in a long lane, for a host: as much as ours has
PREFIX = "ours"
ALONE = "consumers alone"
PLAIN_OBJECTS = {"images": 320, "records": 1024, "ragged": 1024, "batches": 1024}


@dataclass(frozen=True)
class Setting:
    """What a peer's users tune: loader workers per rank, how far it downloads ahead, the local cache of the host."""

    workers: int
    ahead: int
    cache_bytes: int | None = None  # None: without a limit, or without a cache

    def __str__(self) -> str:
        told = [f"{self.workers} worker(s)", *([f"ahead {self.ahead}"] if self.ahead else [])]
        return ", ".join(told + ([f"cache {self.cache_bytes >> 20} MiB"] if self.cache_bytes else []))


@dataclass(frozen=True)
class LaneSpec:
    """One lane over one source. ``layout``: what is stored, "elements" or "samples".

    ``epochs``: we read the same shards so often, a peer reads a dataset so many times as long, once.
    """

    name: str
    library: str  # of the zygote; "ours" for the ceiling
    workload: str
    layout: str
    source: str
    count: int  # stored items
    setting: Setting | None = None
    nnodes: int = 1
    nproc: int = RANKS
    epochs: int = 1

    @property
    def is_delivered(self) -> bool:
        """Whether there is something to verify: not of the ceiling, nor of elements that are there already."""
        return self.name != ALONE and not self.name.startswith("ceiling")

    @property
    def is_peer(self) -> bool:
        return self.library != "ours"

    @property
    def is_long(self) -> bool:
        return self.epochs > 1

    @property
    def passes(self) -> int:
        """How often the same elements are delivered in order, one pass behind the other."""
        return 1 if self.is_peer else self.epochs

    @property
    def batch(self) -> int:
        """How many samples the reader collates; 0 where elements are stored."""
        return BATCH if self.layout == "samples" and WORKLOADS[self.workload].collated else 0

    @property
    def groups(self) -> list[list[int]]:
        """The ranks of each of the two processes of this host."""
        share = self.nproc // RANKS
        return [list(range(share * one, share * (one + 1))) for one in range(RANKS)]

    def with_setting(self, setting: Setting) -> LaneSpec:
        return replace(self, setting=setting)

    def order(self) -> checks.Order:
        """Return the order that it owes."""
        if not self.is_peer:
            return checks.strided(self.groups, self.nproc * self.nnodes)
        assert self.setting is not None
        message = self.batch or WORKLOADS[self.workload].message
        if self.library == "webdataset":
            return checks.by_shards(shards=SHARDS * self.epochs, workers=self.setting.workers, message=message)
        if self.library == "litdata":
            chunk = self.count // SHARDS if self.is_long else 0
            return checks.ascending(workers=self.setting.workers, message=message, chunk=chunk)
        return checks.strided([[0], [1]], RANKS)


def settings(lane: LaneSpec, *, quick: bool) -> list[Setting]:
    """Return the settings of which the best is taken."""
    workers = (0, 2) if quick or lane.is_long else (0, 1, 2)
    ahead = {"streaming": lane.count // 4, "litdata": 4}.get(lane.library, 0)
    cache_bytes = LONG_BYTES if lane.is_long and lane.library in ("streaming", "litdata") else None
    return [Setting(one, ahead, cache_bytes) for one in workers]


@dataclass
class Runner:
    """Turns a lane into the members of a run. ``scratch`` is in memory; every run has an empty cache."""

    scratch: Path
    sources: dict[str, Source]
    _number: int = field(default=0)

    def members(
        self, lane: LaneSpec, *, verify: bool, limit_s: float | None = None
    ) -> tuple[list[dict[str, Any]], Path]:
        """Return the members, and their folder, which is to be removed after the run.

        A peer's ranks stop reading after ``limit_s``.
        """
        self._number += 1
        folder = self.scratch / f"run-{self._number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if lane.is_peer:
            return self._peer(lane, folder, verify=verify, limit_s=limit_s), folder
        if lane.name.startswith("ceiling"):
            return [{"reader": "ceiling", "given": self._ceiling(lane)}], folder
        if lane.name == ALONE:
            given = {"workload": lane.workload, "count": lane.count, "epochs": lane.epochs}
            return [{"reader": "alone", "given": {**given, "rank": rank}} for rank in range(RANKS)], folder
        return self._ours(lane, folder, verify=verify), folder

    def _ceiling(self, lane: LaneSpec) -> dict[str, Any]:
        return {"urls_path": str(self.urls_path(lane)), "threads": FETCHES, "epochs": lane.epochs}

    def _ours(self, lane: LaneSpec, folder: Path, *, verify: bool) -> list[dict[str, Any]]:
        source = self.sources[lane.source]
        plan = prepared.launch_plan(lane.workload, lane.count, nnodes=lane.nnodes, nproc=lane.nproc, epochs=lane.epochs)
        (folder / "plan.json").write_bytes(plan.to_bytes())
        (folder / "counters").mkdir()
        feeder = {
            "store": source.config.model_copy(update={"prefix": PREFIX}).model_dump(mode="json"),
            "launch_plan": plan.model_dump(mode="json"),
            "node_rank": 0,
            "socket": str(folder / "s"),
            "cache_dir": str(folder / "cache"),
            "stats_path": str(folder / "stats.json"),
            "host": "bench",
        }
        (folder / "feeder.json").write_text(json.dumps(feeder))
        given = {"plan_path": str(folder / "plan.json"), "socket": str(folder / "s"), "counters": f"{folder}/counters"}
        ranks = [
            {"reader": "ours", "given": {**given, "ranks": ranks, "epochs": lane.epochs, "verify": verify}}
            for ranks in lane.groups
        ]
        return [{"reader": "feed", "given": {"path": str(folder / "feeder.json")}, "service": True}, *ranks]

    def _peer(self, lane: LaneSpec, folder: Path, *, verify: bool, limit_s: float | None) -> list[dict[str, Any]]:
        assert lane.setting is not None
        source = self.sources[lane.source]
        given = {
            "library": lane.library,
            "ranks": RANKS,
            "workers": lane.setting.workers,
            "message": WORKLOADS[lane.workload].message,
            "batch": lane.batch,
            "workload": lane.workload,
            "group": str(folder / "group"),
            "verify": verify,
            "limit_s": limit_s,
            "source": {
                "s3": f"s3://{source.config.bucket}/{peer_key(lane)}",
                "cache": str(folder / "cache"),
                "urls": str(self.urls_path(lane)),
                "ahead": lane.setting.ahead,
                "cache_bytes": lane.setting.cache_bytes,
                "ranks": RANKS,
                "count": lane.count,
                "collated": WORKLOADS[lane.workload].collated and lane.layout == "elements",
            },
        }
        return [{"reader": "read", "given": {**given, "rank": rank}, "env": source.env()} for rank in range(RANKS)]

    def urls_path(self, lane: LaneSpec) -> Path:
        times = lane.epochs if lane.is_peer else 1
        return self.scratch / "urls" / f"{lane.source}-{lane.library}-{lane.workload}-{lane.layout}-{times}.json"

    def sign(self, lane: LaneSpec, www: Path, shards: dict[str, list[tuple[str, int]]]) -> None:
        """Write the presigned URLs that a lane reads, before anything is measured."""
        path = self.urls_path(lane)
        path.parent.mkdir(parents=True, exist_ok=True)
        if lane.library == "ours":
            store = open_store(self.sources[lane.source].config.model_copy(update={"prefix": PREFIX}))
            urls: list[Any] = [(store.presign_get(key, expires_s=7200), size) for key, size in shards[lane.workload]]
        else:
            store = open_store(self.sources[lane.source].config)
            names = sorted(one.name for one in (www / peer_key(lane)).iterdir())
            urls = [store.presign_get(f"{peer_key(lane)}/{name}", expires_s=7200) for name in names]
        path.write_text(json.dumps(urls))


def peer_key(lane: LaneSpec) -> str:
    """Return the prefix of a peer's dataset."""
    return f"peers/{lane.library}/{lane.workload}-{lane.layout}" + (f"-{lane.epochs}-times" if lane.is_long else "")
