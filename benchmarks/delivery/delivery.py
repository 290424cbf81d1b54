"""Delivery beside the peers: the same elements, read by two ranks of one host from the same servers."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.delivery import checks, lanes, peers, prepared, repeats, workloads
from benchmarks.delivery.common import Lane, Options, Section
from benchmarks.delivery.lanes import EPOCHS, LaneSpec, Runner, Setting
from benchmarks.delivery.servers import nginx, seaweedfs
from benchmarks.delivery.zygotes import Zygote
from taas_tasks.shards.checksum import crc32
from taas_tasks.stack.seaweed import BUCKET
from taas_tasks.store.http_reader import _HOT_BYTES as PIECE_BYTES

SOURCES = ("nginx", "seaweedfs")
_WRITE_S = 240
_RUN_S, _LONG_RUN_S, _TRIAL_S = 90.0, 240.0, 30.0


@dataclass(frozen=True)
class _Pace:
    """How long peers' long lanes take: a setting is tried for ``tuning_s``; a lane is repeated until it was measured
    for ``enough_s`` in all, but twice unless one run takes ``once_s``."""

    tuning_s: float
    enough_s: float
    once_s: float


_FULL, _QUICK = _Pace(1.5, 10.0, 25.0), _Pace(0.5, 5.0, 5.0)


@dataclass
class _Bench:
    options: Options
    runner: Runner
    zygotes: dict[str, Zygote]
    truths: dict[tuple[str, str], checks.Truth]
    bucket: Path
    results: dict[LaneSpec, Lane] = field(default_factory=dict)

    @property
    def pace(self) -> _Pace:
        return _QUICK if self.options.quick else _FULL

    def run(self, lane: LaneSpec, *, verify: bool = False, reading_s: float | None = None) -> dict[str, Any]:
        members, folder = self.runner.members(lane, verify=verify, limit_s=reading_s)
        source = self.runner.sources[lane.source]
        before, server_s = source.requests(), source.cpu_s()
        limit_s = _TRIAL_S if reading_s is not None else _LONG_RUN_S if lane.is_long else _RUN_S
        found = self.zygotes[lane.library].run(members, limit_s=limit_s)
        after = source.requests()
        found["requests"] = None if before is None or after is None else after - before - 1
        found["server_cpu_s"] = source.cpu_s() - server_s
        stats = folder / "stats.json"
        if stats.exists():
            found["fetched_bytes"] = json.loads(stats.read_text())["delivered_bytes"]["data"]
        shutil.rmtree(folder, ignore_errors=True)
        return found


def run(options: Options) -> Section:
    """Measure every lane; a peer that fails voids its own lanes only."""
    before = _shared_memory()
    try:
        peers.ensure()
        with ExitStack() as stack:
            return _measure(options, stack)
    finally:
        _remove_shared_memory(before)


def _measure(options: Options, stack: ExitStack) -> Section:
    root = options.scratch / "delivery"
    www = root / "www"
    zygotes = {name: Zygote(name, root / f"zygote-{name}") for name in ("ours", "plain", *peers.LIBRARIES)}
    for one in zygotes.values():
        stack.callback(one.close)
    specs = _specs(quick=options.quick)
    _say("writing the data")
    shards = _write(specs, www / BUCKET, root)
    sources = {"nginx": stack.enter_context(nginx(www, root / "nginx"))}
    _say("uploading it to SeaweedFS")
    sources["seaweedfs"] = stack.enter_context(seaweedfs(www, root / "weed"))
    for spec in (one for one in specs if one.is_peer and one.is_long):  # behind the upload: only nginx serves them
        short = replace(spec, epochs=1)
        source, target = (www / BUCKET / lanes.peer_key(one) for one in (short, spec))
        repeats.repeat(spec.library, source, target, times=spec.epochs)
    runner = Runner(root / "runs", sources)
    for spec in specs:
        if spec.name.startswith("ceiling") or spec.library in ("webdataset", "plain"):
            runner.sign(spec, www / BUCKET, shards)
    bench = _Bench(options, runner, zygotes, _truths(specs), www / BUCKET)
    _say("settings of the peers")
    tuned: dict[tuple[str, str, str, int], Setting] = {}
    chosen = [_tuned(bench, spec, tuned) for spec in specs]
    _say("verifying every lane")
    for spec in chosen:
        _verify(bench, spec)
    for number in range(options.repetitions):
        _say(f"repetition {number + 1} of {options.repetitions}")
        shift = number * max(1, len(chosen) // options.repetitions)
        for spec in chosen[shift:] + chosen[:shift]:
            _repeat(bench, spec)
    return _section(bench)


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} delivery: {what}", file=sys.stderr, flush=True)


# --- what there is to measure ---------------------------------------------------------------------------------------


def _specs(*, quick: bool) -> list[LaneSpec]:
    found = []
    for source in SOURCES:
        for workload in workloads.WORKLOADS.values():
            if not quick or source == "nginx" or workload.num_elements(quick=True) < 1000:
                found += _of_workload(workload, source, quick=quick)
        images = workloads.WORKLOADS["images"].num_elements(quick=quick)
        for nnodes in (1, 2, 4) if source == "nginx" or not quick else ():
            name = f"taas, a host of {8 * nnodes} ranks"
            found.append(LaneSpec(name, "ours", "images", "elements", source, images, nnodes=nnodes, nproc=8))
    return found


def _of_workload(workload: workloads.Workload, source: str, *, quick: bool) -> list[LaneSpec]:
    name, count = workload.name, workload.num_elements(quick=quick)
    found = [LaneSpec("ceiling", "ours", name, "elements", source, count)]
    found.append(LaneSpec("taas", "ours", name, "elements", source, count))
    if source == SOURCES[0]:  # what the client can do: the server is to cost as little as it may
        for long in (f"ceiling, {EPOCHS} times", f"taas, {EPOCHS} epochs", lanes.ALONE):
            found.append(LaneSpec(long, "ours", name, "elements", source, count, epochs=EPOCHS))
    found += _of_peers(workload, source, quick=quick)
    if source == SOURCES[0]:
        found += [
            replace(one, name=f"{one.name}, {EPOCHS} times", epochs=EPOCHS)
            for one in _of_peers(workload, source, quick=quick)
        ]
    return found


def _of_peers(workload: workloads.Workload, source: str, *, quick: bool) -> list[LaneSpec]:
    name, count = workload.name, workload.num_elements(quick=quick)
    found = []
    for library in peers.LIBRARIES:
        found.append(LaneSpec(library, library, name, "elements", source, count))
        if workload.collated:
            samples = workloads.BATCH * count
            found.append(LaneSpec(f"{library}, samples", library, name, "samples", source, samples))
    plain = min(lanes.PLAIN_OBJECTS[name], count * (workloads.BATCH if workload.collated else 1))
    layout = "samples" if workload.collated else "elements"
    return [*found, LaneSpec("plain, object per sample", "plain", name, layout, source, plain)]


def _write(specs: list[LaneSpec], bucket: Path, root: Path) -> dict[str, list[tuple[str, int]]]:
    """Write everyone's data; return our shards by workload."""
    jobs: dict[str, dict[str, dict[str, Any]]] = {}
    for spec in specs:
        if spec.is_peer and not spec.is_long:
            folder = str(bucket / lanes.peer_key(spec))
            job = {"workload": spec.workload, "layout": spec.layout, "count": spec.count, "folder": folder}
            jobs.setdefault(spec.library, {})[folder] = job
    running = []
    for library, todo in jobs.items():
        path = root / f"write-{library}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"shards": lanes.SHARDS, "jobs": list(todo.values())}))
        command = [str(peers.python()), "-m", "benchmarks.delivery.peer_writers", library, str(path)]
        with (root / f"write-{library}.log").open("wb") as log:
            running.append(
                subprocess.Popen(
                    command, env=peers.environment(library), cwd=peers.ROOT, stdout=log, stderr=subprocess.STDOUT
                )
            )
    counts = {spec.workload: spec.count for spec in specs if spec.name == "taas"}
    try:
        shards = {
            one: prepared.write(one, count, bucket / lanes.PREFIX, epochs=EPOCHS) for one, count in counts.items()
        }
        for process in running:
            process.wait(_WRITE_S)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, library in zip(running, jobs, strict=True):
        if process.returncode != 0:
            _say(f"{library} could not write: {(root / f'write-{library}.log').read_text(errors='replace')[-500:]}")
            for folder in jobs[library]:
                Path(folder).mkdir(parents=True, exist_ok=True)
    return shards


def _truths(specs: list[LaneSpec]) -> dict[tuple[str, str], checks.Truth]:
    truths = {}
    most: dict[tuple[str, str], int] = {}
    for spec in specs:
        if spec.library != "plain" or spec.layout == "samples":
            most[spec.workload, spec.layout] = max(spec.count, most.get((spec.workload, spec.layout), 0))
    for (workload, layout), count in most.items():
        make = workloads.sample if layout == "samples" else workloads.element
        known = [make(workload, index) for index in range(count)]
        truths[workload, layout] = checks.Truth(
            tuple((tuple(workloads.identity(one)), workloads.digest(one)) for one in known)
        )
    return truths


# --- measuring ------------------------------------------------------------------------------------------------------


def _tuned(bench: _Bench, spec: LaneSpec, tuned: dict[tuple[str, str, str, int], Setting]) -> LaneSpec:
    """Return a peer's lane with the setting that was fastest in one run each, from the first source."""
    if not spec.is_peer:
        return spec
    place = (spec.library, spec.workload, spec.layout, spec.epochs)
    if place not in tuned:
        tuned[place] = _best(bench, spec)
    return spec.with_setting(tuned[place])


def _best(bench: _Bench, spec: LaneSpec) -> Setting:
    options = lanes.settings(spec, quick=bench.options.quick)
    timed = []
    for setting in options:
        found = bench.run(spec.with_setting(setting), reading_s=bench.pace.tuning_s if spec.is_long else None)
        if "error" not in found:
            timed.append((sum(rank["bytes"] / rank["reading_s"] for rank in found["ranks"]), setting))
    return max(timed, key=lambda one: one[0])[1] if timed else options[0]


def _verify(bench: _Bench, spec: LaneSpec) -> None:
    lane = Lane("delivery", spec.name, spec.workload, spec.source, "MB/s", [])
    lane.more = {
        "stores": spec.layout,
        "setting": str(spec.setting or f"{lanes.FETCHES} fetches at once"),
        "requests": [],
        "feeder_cpu_s_per_gb": [],
        "server_cpu_s": [],
    }
    bench.results[spec] = lane
    if not spec.is_delivered:
        return
    found = bench.run(spec, verify=True)
    truth = bench.truths[spec.workload, spec.layout]
    truth = checks.Truth(truth.elements[: spec.count] * (spec.epochs // spec.passes))
    if "error" in found:
        lane.void = f"it failed: {found['error']}"
    elif spec.nnodes > 1:
        lane.void = _partial_fault(truth, spec, found["ranks"])
    else:
        seen = [rank["seen"] for rank in found["ranks"]]
        passes = checks.passes(seen, spec.passes)
        lane.void = next((why for one in passes if (why := checks.fault(truth, one, spec.order()))), None)
        lane.void = lane.void or _unread(bench, spec, found["requests"])
    if lane.void:
        _say(f"void: {spec.name}, {spec.workload}, {spec.source}: {lane.void[-600:]}")


def _unread(bench: _Bench, spec: LaneSpec, requests: int | None) -> str | None:
    """Return whether a peer cannot have read all of its dataset from the server."""
    files = len(list((bench.bucket / lanes.peer_key(spec)).iterdir())) if spec.is_peer else 0
    if requests is None or requests >= files:
        return None
    return f"it asked the server {requests} times for {files} files: something came out of a cache"


def _partial_fault(truth: checks.Truth, spec: LaneSpec, ranks: list[dict[str, Any]]) -> str | None:
    """Return what is wrong with the part of one host of several."""
    world = spec.nproc * spec.nnodes
    own = tuple(one for place, one in enumerate(truth.elements) if place % world < spec.nproc)
    return checks.fault(checks.Truth(own), [rank["seen"] for rank in ranks], checks.strided(spec.groups, spec.nproc))


def _repeat(bench: _Bench, spec: LaneSpec) -> None:
    lane = bench.results[spec]
    if lane.void or (spec.is_peer and spec.is_long and _is_enough(lane, bench.pace)):
        return
    found = bench.run(spec)
    if "error" in found:
        lane.void = f"it failed: {found['error']}"
        return
    num_bytes = sum(rank["bytes"] for rank in found["ranks"])
    num_elements = sum(rank["elements"] for rank in found["ranks"])
    wanted = spec.count * spec.epochs // (spec.batch or 1) // spec.nnodes
    if spec.is_delivered and num_elements != wanted:
        lane.void = f"{num_elements} elements came in a repetition, not {wanted}"
        return
    lane.values.append(num_bytes / 1e6 / found["seconds"])
    lane.cpu_s_per_gb.append(found["cpu_s"] / (num_bytes / 1e9))
    lane.more["feeder_cpu_s_per_gb"].append(round(found["services_cpu_s"] / (num_bytes / 1e9), 3))
    lane.more["server_cpu_s"].append(round(found["server_cpu_s"], 2))
    lane.more["requests"].append(found["requests"])
    lane.more["payload_bytes"] = num_bytes
    if "fetched_bytes" in found:
        lane.more["fetched_bytes"] = found["fetched_bytes"]


def _is_enough(lane: Lane, pace: _Pace) -> bool:
    """Return whether a long lane has been measured often and long enough."""
    spent_s = sum(lane.more["payload_bytes"] / 1e6 / mb_s for mb_s in lane.values)
    return spent_s >= (pace.enough_s if len(lane.values) >= 2 else pace.once_s)


# --- what was found -------------------------------------------------------------------------------------------------


def _section(bench: _Bench) -> Section:
    return Section(lanes=list(bench.results.values()), ratios=ratios(bench.results), notes=notes(bench))


def ratios(results: dict[LaneSpec, Lane]) -> dict[str, Any]:
    """Return ours against the best peer that stores the same elements, and against the ceiling, by workload.

    Long lanes are compared with long ones; short ones, start-up included, under names with ``_with_start``.
    """
    found: dict[str, Any] = {}
    for source, is_long in ((SOURCES[0], True), *((source, False) for source in SOURCES)):
        suffix = ("" if is_long else "_with_start") + ("" if source == SOURCES[0] else f"_{source}")
        for workload in workloads.WORKLOADS:
            place = (source, workload, is_long)
            here = {
                spec: lane
                for spec, lane in results.items()
                if (spec.source, spec.workload, spec.is_long) == place and not lane.void and lane.values
            }
            for name, value in _compared(here).items():
                _put(found, f"{name}{suffix}", workload, value)
    if "vs_ceiling" in found:
        found["vs_ceiling_by_workload"] = found.pop("vs_ceiling")
    found["vs_ceiling"] = min(found.get("vs_ceiling_by_workload", {}).values(), default=None)
    return found


def _compared(here: dict[LaneSpec, Lane]) -> dict[str, float]:
    """Return the ratios of lanes of one source, workload and length."""
    by_name = {spec.name.partition(",")[0]: lane for spec, lane in here.items() if spec.nproc == lanes.RANKS}
    ours, ceiling = by_name.get("taas"), by_name.get("ceiling")
    same = [lane for spec, lane in here.items() if spec.library in peers.LIBRARIES and spec.layout == "elements"]
    samples = [lane for spec, lane in here.items() if spec.is_peer and spec.layout == "samples"]
    if ours is None:
        return {}
    found = {}
    if same:
        found["mb_s_vs_best_peer"] = ours.median / max(one.median for one in same)
        found["cpu_vs_best_peer"] = _cpu(ours) / min(_cpu(one) for one in same)
    if samples:
        found["mb_s_vs_best_peer_of_samples"] = ours.median / max(one.median for one in samples)
    if ceiling is not None:
        found["vs_ceiling"] = ours.median / ceiling.median
    return found


def _put(found: dict[str, Any], name: str, workload: str, value: float) -> None:
    found.setdefault(name, {})[workload] = round(value, 3)


def _cpu(lane: Lane) -> float:
    return statistics.median(lane.cpu_s_per_gb)


def notes(bench: _Bench) -> list[str]:
    """Return what a reader of the table must know."""
    cores = os.cpu_count()
    return [
        f"{cores} cores are shared by the server, the feeder, two ranks and their loader workers.",
        *(f"{one.name}: {one.about}." for one in workloads.WORKLOADS.values()),
        "MB/s are payload bytes over the seconds from the start of reading to the slowest rank's last element; CPU "
        "s/GB are of all processes of the lane, without the server.",
        "Peers read by their own S3 clients (mosaicml-streaming, litdata) or by presigned URLs (webdataset with curl, "
        "plain with urllib3) from the same servers; local caches are in /dev/shm and empty at each start.",
        "An element of images, records and ragged is a sample: what peers store is the same in both ways. Of batches "
        "they store samples (and collate in the reader) or the collated elements.",
        f"Lanes of {EPOCHS} epochs and {EPOCHS} times: ours reads its shards {EPOCHS} times, each byte anew from the "
        f"server; a peer reads a dataset {EPOCHS} times as long: hard links to its shards, chunks or objects by other "
        "names, all of which its index names. It asks for every file (a lane with fewer requests is void), and the "
        "server needs no more memory than for ours.",
        f"Local caches in long lanes hold {lanes.LONG_BYTES >> 20} MiB for the host, as ours: mosaicml-streaming by "
        "cache_limit, litdata by max_cache_size (half for each rank's folder); webdataset and plain have none.",
        f"plain reads {EPOCHS} times its short lane, fewer bytes than the others: what an object costs stays the same.",
        "mb_s_vs_best_peer, cpu_vs_best_peer and vs_ceiling are of these long lanes; with _with_start of one short "
        "epoch from nothing: connecting, indexing and the first use of memory included.",
        f"A peer's long lane is repeated until it was measured for {bench.pace.enough_s:.0f} s, but twice (once where "
        f"it takes {bench.pace.once_s:.0f} s); its setting is the best of trials of {bench.pace.tuning_s} s.",
        "The ceiling is one process with as many threads as our feeder has fetches.",
        "torchvision and transformers are replaced by stand-ins, as mosaicml-streaming imports but does not use them.",
        *limits(bench.results),
    ]


def limits(results: dict[LaneSpec, Lane]) -> list[str]:
    """Return what the cores allow, from what the parts cost by themselves."""
    crc, cores = _crc_s_per_gb(), os.cpu_count() or 1
    return [
        _limit(workload, {spec.name: lane for spec, lane in here}, crc=crc, cores=cores)
        for workload in workloads.WORKLOADS
        if len(here := [one for one in results.items() if _bounds(one[0], workload) and one[1].values]) == len(_BOUNDS)
    ]


_BOUNDS = (f"ceiling, {EPOCHS} times", f"taas, {EPOCHS} epochs", lanes.ALONE)


def _bounds(spec: LaneSpec, workload: str) -> bool:
    return (spec.workload, spec.source) == (workload, SOURCES[0]) and spec.name in _BOUNDS


def _limit(workload: str, here: dict[str, Lane], *, crc: float, cores: int) -> str:
    ceiling, ours, alone = (here[name] for name in _BOUNDS)
    served = statistics.median(ceiling.more["server_cpu_s"]) / (ceiling.more["payload_bytes"] / 1e9)
    least = served + _cpu(ceiling) + crc + _cpu(alone)
    feeder = statistics.median(ours.more["feeder_cpu_s_per_gb"])
    return (
        f"Limit of {cores} cores, {workload}: nginx {served:.2f} + bare GET {_cpu(ceiling):.2f} + our crc32 {crc:.2f} "
        f"+ the consumers' own copying {_cpu(alone):.2f} = {least:.2f} CPU s/GB, so at most {1000 * cores / least:.0f} "
        f"MB/s; ours took {_cpu(ours):.2f} (feeder {feeder:.2f}, ranks {_cpu(ours) - feeder:.2f}) beside the server, "
        f"and reached {ours.median:.0f} MB/s."
    )


def _crc_s_per_gb() -> float:
    """Return what our checksum costs where our feeder takes it: of pieces that are in the processor's cache."""
    piece, num_pieces, found = os.urandom(PIECE_BYTES), 4096, 0
    before = time.process_time()
    for _ in range(num_pieces):
        found = crc32(piece, found)
    return (time.process_time() - before) / (num_pieces * len(piece) / 1e9)


def _shared_memory() -> set[Path]:
    """Return what mosaicml-streaming has in /dev/shm: names of six digits."""
    return set(Path("/dev/shm").glob("[0-9][0-9][0-9][0-9][0-9][0-9]_*"))


def _remove_shared_memory(before: set[Path]) -> None:
    """Remove what it left."""
    for path in _shared_memory() - before:
        path.unlink(missing_ok=True)
