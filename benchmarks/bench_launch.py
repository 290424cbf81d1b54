"""Launches of a training: do any hang, where do the seconds go, what do faults cost, beside others in the same run.

    python -m benchmarks.bench_launch [--quick]

First, on this machine alone: each launch takes one node agent (a real process, over a real S3 server) from its start
through the first all-reduce and five DDP steps to the end of its last process. Every ``--torchrun-every``-th launch is
followed by one of torchrun with the same script, so both see the same machine. Then, where podman is there, on a
cluster of hosts over SSH (``benchmarks/launch``). Results: tables, ``var/bench/launch.json`` and ``launch.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.launch.lanes import LAUNCHERS
from benchmarks.launch.run import CASES, QUICK_SIZES, SIZES, ClusterBench
from benchmarks.launch.run import run as run_on_cluster
from taas_tasks.launch.processes import MARK, end_marked
from taas_tasks.layout import run_key
from taas_tasks.project import commit
from taas_tasks.stack import processes, seaweed
from taas_tasks.store import ObjectStore, open_store
from taas_tasks.values import LaunchPlan, StoreConfig
from taas_tasks.verdict import gather
from tests.cluster.podman import why_not

SCRIPT = """
import json, os, time
times = {"script": time.time()}
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
times["import"] = time.time()
dist.init_process_group(BACKEND, init_method="env://")
times["rendezvous"] = time.time()
total = torch.ones(1)
dist.all_reduce(total)
assert int(total) == dist.get_world_size()
times["all-reduce"] = time.time()
model = DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
times["steps"] = time.time()
with open(os.path.join(os.environ["BENCH_OUT"], os.environ["RANK"]), "w") as out:
    json.dump(times, out)
dist.destroy_process_group()
"""
PARTS = ("script", "import", "rendezvous", "all-reduce", "steps", "exit")
EXPLAINED = {
    "script": "from the start to the slowest rank's first line",
    "import": "import torch in the script",
    "rendezvous": "init_process_group",
    "all-reduce": "the first all-reduce",
    "steps": "DDP and five steps (imports torch._dynamo)",
    "exit": "until the last process has gone",
}


@dataclass
class Lane:
    """All launches of one launcher."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in (*PARTS, "total")})
    hangs: int = 0
    bounded_exits: int = 0  # ranks that did not leave by themselves and were cut off by the agent's bound
    failures: list[str] = field(default_factory=list)

    def add(self, started: float, ended: float, out: Path, ranks: int) -> None:
        """Take the times of one launch; a part ends when its slowest rank has reached it."""
        found = [json.loads((out / str(rank)).read_text()) for rank in range(ranks)]
        before = started
        for part in PARTS[:-1]:
            reached = max(times[part] for times in found)
            self.seconds[part].append(reached - before)
            before = reached
        self.seconds["exit"].append(ended - before)
        self.seconds["total"].append(ended - started)


def percentile(values: list[float], share: float) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Bench:
    """What all launches share."""

    folder: Path
    config: StoreConfig
    store: ObjectStore
    snapshot: str
    ranks: int
    limit_s: float
    keep: Path
    ours: Lane = field(default_factory=Lane)
    torchrun: Lane = field(default_factory=Lane)

    def launch_ours(self, number: int) -> None:
        """One launch by a node agent."""
        job = self.folder / f"job-{number}"
        out = job / "out"
        out.mkdir(parents=True)
        run = run_key(f"bench-{number}")
        plan = LaunchPlan(
            run=run,
            run_id=f"bench-{number}",
            project="bench",
            snapshot=self.snapshot,
            generation=1,
            nnodes=1,
            nproc_per_node=self.ranks,
            flavor="g2.8",
            emulate_gpus=True,
            script="train.py",
            seed=0,
            cache_bytes=1 << 20,
        )
        given = {
            "store": self.config.model_dump(),
            "run": run,
            "run_id": f"bench-{number}",
            "project": "bench",
            "snapshot": self.snapshot,
            "generation": 1,
            "host": "local",
            "host_root": str(job / "host"),
            "launch_plan": plan.model_dump(mode="json"),
            "node_rank": 0,
            "env": {"BENCH_OUT": str(out)},
        }
        (job / "host").mkdir()
        (job / "input.json").write_text(json.dumps(given))
        command = [sys.executable, "-m", "taas_tasks.launch.agent_program", str(job / "input.json")]
        self._launch(self.ours, command, job, out, env=dict(os.environ))
        ranks = [rank for node in gather(self.store, run, 1, 1).nodes for rank in node.ranks]
        self.ours.bounded_exits += sum(rank.exit_code == 0 and rank.message is not None for rank in ranks)

    def launch_torchrun(self, number: int) -> None:
        """One launch by torchrun."""
        job = self.folder / f"torchrun-{number}"
        out = job / "out"
        out.mkdir(parents=True)
        script = job / "train.py"
        script.write_text(SCRIPT.replace("BACKEND", "'gloo'"))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        env = {**os.environ, "BENCH_OUT": str(out), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._launch(self.torchrun, [*command, str(script)], job, out, env=env)

    def _launch(self, lane: Lane, command: list[str], job: Path, out: Path, *, env: dict[str, str]) -> None:
        mark = f"bench-{job.name}-{os.getpid()}"
        started = time.time()
        with (job / "log").open("wb") as log:
            agent = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**env, MARK: mark}
            )
        try:
            code = agent.wait(self.limit_s)
            ended = time.time()
        except SystemExit:
            agent.kill()
            end_marked(mark, grace_s=0)
            raise
        except subprocess.TimeoutExpired:
            lane.hangs += 1
            shutil.copy(job / "log", self.keep / f"hang-{job.name}.log")
            agent.send_signal(signal.SIGKILL)
            agent.wait()
            end_marked(mark, grace_s=0)
            return
        left = end_marked(mark, grace_s=0)
        if code != 0 or left:
            text = (job / "log").read_text(errors="replace")[-2000:]
            lane.failures.append(f"exit code {code}, {len(left)} process(es) left: {text}")
        else:
            lane.add(started, ended, out, self.ranks)
        shutil.rmtree(job, ignore_errors=True)


def table(bench: Bench) -> str:
    """Return the results for people."""
    lines = [f"{'seconds, p50 / p95':<20}{'taas':>18}{'torchrun':>18}"]
    for part in (*PARTS, "total"):
        cells = [_cell(lane.seconds[part]) for lane in (bench.ours, bench.torchrun)]
        lines.append(f"{part:<20}{cells[0]:>18}{cells[1]:>18}  {EXPLAINED.get(part, '')}")
    counts = [str(len(lane.seconds["total"])) for lane in (bench.ours, bench.torchrun)]
    lines.append(f"{'launches':<20}{counts[0]:>18}{counts[1]:>18}")
    lines.append(f"{'hangs':<20}{bench.ours.hangs:>18}{bench.torchrun.hangs:>18}")
    lines.append(f"{'cut-off exits':<20}{bench.ours.bounded_exits:>18}{bench.torchrun.bounded_exits:>18}")
    lines.append(f"{'failures':<20}{len(bench.ours.failures):>18}{len(bench.torchrun.failures):>18}")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    return f"{percentile(values, 0.5):.2f} / {percentile(values, 0.95):.2f}" if values else "-"


def as_json(bench: Bench) -> dict[str, object]:
    """Return the results with every single measurement."""
    return {
        "ranks": bench.ranks,
        "cores": os.cpu_count(),
        "machine": platform.platform(),
        "limit_s": bench.limit_s,
        **{
            name: {
                "launches": len(lane.seconds["total"]) + lane.hangs + len(lane.failures),
                "hangs": lane.hangs,
                "failures": lane.failures,
                "bounded_exits": lane.bounded_exits,
                "p50_s": {part: round(percentile(values, 0.5), 3) for part, values in lane.seconds.items() if values},
                "p95_s": {part: round(percentile(values, 0.95), 3) for part, values in lane.seconds.items() if values},
                "mean_s": {part: round(statistics.mean(values), 3) for part, values in lane.seconds.items() if values},
                "seconds": lane.seconds,
            }
            for name, lane in (("taas", bench.ours), ("torchrun", bench.torchrun))
        },
    }


def _with_server(folder: Path, act: Callable[[StoreConfig], None]) -> None:
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
        act(config)
    finally:
        processes.stop(server, grace_s=0)
        seaweed.remove_sockets(ports)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 launches, and each case once on 1 and 2 hosts")
    parser.add_argument("--launches", type=int, help="on this machine (200; quick: 10)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--torchrun-every", type=int, default=5, help="a launch by torchrun after so many of ours")
    parser.add_argument("--limit-s", type=float, default=120.0, help="a launch that takes longer counts as a hang")
    parser.add_argument("--repetitions", type=int, help="of each case on the cluster (5; quick: 1; 0: no cluster)")
    parser.add_argument("--launchers", type=_names, default=LAUNCHERS, help=f"some of {', '.join(LAUNCHERS)}")
    parser.add_argument("--cases", type=_names, default=CASES, help=f"some of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, default=Path("var/bench/launch.json"))
    given = parser.parse_args(argv)
    given.launches = given.launches if given.launches is not None else 10 if given.quick else 200
    given.repetitions = given.repetitions if given.repetitions is not None else 1 if given.quick else 5
    return given


def main(argv: list[str] | None = None) -> int:
    given = _arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = {"quick": given.quick, "load_at_start": os.getloadavg()}
    bench = _on_this_machine(given, results)
    cluster = _on_cluster(given, results)
    text = "\n\n".join([f"```\n{table(bench)}\n```", *([cluster.table()] if cluster else [])])
    given.out.with_suffix(".md").write_text(f"{text}\n")
    print(text)
    is_well = not bench.ours.hangs and not bench.ours.failures and (cluster is None or cluster.is_well)
    return 0 if is_well else 1


def _on_this_machine(given: argparse.Namespace, results: dict[str, object]) -> Bench:
    benches: list[Bench] = []

    def act(config: StoreConfig) -> None:
        store = open_store(config)
        script = SCRIPT.replace("BACKEND", "'nccl'").encode()
        snapshot = commit(store, "bench", {"train.py": script}, author="bench").snapshot
        bench = Bench(folder / "jobs", config, store, snapshot, given.ranks, given.limit_s, given.out.parent)
        benches.append(bench)
        for number in range(given.launches):
            bench.launch_ours(number)
            if number % given.torchrun_every == 0:
                bench.launch_torchrun(number)
            _keep(given.out, results, as_json(bench))
            print(f"{number + 1}/{given.launches}: {_cell(bench.ours.seconds['total'])} s", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="taas-bench-") as name:
        folder = Path(name)
        _with_server(folder / "s3", act)
    return benches[0]


def _on_cluster(given: argparse.Namespace, results: dict[str, object]) -> ClusterBench | None:
    """Run the part on the cluster; None where there can be none, and why is told."""
    if given.repetitions == 0:
        return None
    if reason := why_not():
        print(f"no cluster on this machine: {reason}", file=sys.stderr)
        return None
    sizes = QUICK_SIZES if given.quick else SIZES
    bench = ClusterBench(given.repetitions, sizes=sizes, launchers=given.launchers, cases=given.cases)
    run_on_cluster(bench, lambda: _keep(given.out, results, {"cluster": bench.as_json()}))
    _keep(given.out, results, {"cluster": bench.as_json(), "load_at_end": os.getloadavg()})
    return bench


def _keep(out: Path, results: dict[str, object], more: dict[str, object]) -> None:
    results.update(more)
    out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
