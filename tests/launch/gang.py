"""Real node agents for tests: one process per emulated node, over a real S3 server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taas_tasks.layout import HostPaths, run_key
from taas_tasks.project import commit
from taas_tasks.result_values import LaunchResult
from taas_tasks.store import open_store
from taas_tasks.values import LaunchPlan, StoreConfig
from taas_tasks.verdict import gather

MARKER = "TAAS_TEST_GANG"


@dataclass
class Gang:
    """A training on emulated nodes. ``stop`` ends whatever is left of it."""

    folder: Path
    config: StoreConfig
    files: dict[str, str]
    nnodes: int = 1
    nproc: int = 2
    plan: dict[str, Any] = field(default_factory=dict)
    plan_of: dict[int, dict[str, Any]] = field(default_factory=dict)  # what one node is given instead
    env: dict[str, str] = field(default_factory=dict)
    run: str = run_key("test")
    generation: int = 1
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = open_store(self.config)
        self.snapshot = commit(
            self.store, "demo", {name: textwrap.dedent(text).encode() for name, text in self.files.items()}, author="t"
        ).snapshot

    def launch_plan(self, node_rank: int) -> LaunchPlan:
        given: dict[str, Any] = {
            "run": self.run,
            "run_id": "test",
            "project": "demo",
            "snapshot": self.snapshot,
            "generation": self.generation,
            "nnodes": self.nnodes,
            "nproc_per_node": self.nproc,
            "flavor": "g2.8",
            "emulate_gpus": True,
            "script": "train.py",
            "seed": 0,
            "cache_bytes": 1 << 20,
        }
        return LaunchPlan.model_validate({**given, **self.plan, **self.plan_of.get(node_rank, {})})

    def job(self, node_rank: int) -> Path:
        return self.folder / f"job-{node_rank}"

    def host_root(self, node_rank: int) -> Path:
        return self.folder / f"host-{node_rank}"

    def project(self, node_rank: int = 0) -> Path:
        return HostPaths(self.host_root(node_rank)).project(self.run, self.generation)

    def start(self) -> Gang:
        for node_rank in range(self.nnodes):
            self._start_agent(node_rank)
        return self

    def _start_agent(self, node_rank: int) -> None:
        job = self.job(node_rank)
        job.mkdir(parents=True)
        self.host_root(node_rank).mkdir(exist_ok=True)
        given = {
            "store": self.config.model_dump(),
            "run": self.run,
            "run_id": "test",
            "project": "demo",
            "snapshot": self.snapshot,
            "generation": self.generation,
            "host": f"host-{node_rank}",
            "host_root": str(self.host_root(node_rank)),
            "launch_plan": self.launch_plan(node_rank).model_dump(mode="json"),
            "node_rank": node_rank,
            "address": "127.0.0.1",
            "env": self.env,
            "secrets": {"THE_SECRET": "s3cret"},
        }
        (job / "input.json").write_text(json.dumps(given))
        command = [sys.executable, "-m", "taas_tasks.launch.agent_program", str(job / "input.json")]
        with (job / "out").open("wb") as out, (job / "err").open("wb") as err:
            env = {**os.environ, MARKER: str(self.folder)}
            agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env)
        self.agents.append(agent)

    def wait(self, timeout_s: float = 240) -> LaunchResult:
        deadline = time.monotonic() + timeout_s
        for agent in self.agents:
            try:
                agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the gang did not end:\n{self.all_output()}") from None
        return self.result()

    def result(self) -> LaunchResult:
        return gather(self.store, self.run, self.generation, self.nnodes)

    def outcome(self, node_rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.job(node_rank) / "outcome.json").read_text())
        return found

    def out(self, node_rank: int = 0) -> str:
        return (self.job(node_rank) / "out").read_text()

    def all_output(self) -> str:
        parts = []
        for node_rank in range(self.nnodes):
            for name in ("out", "err"):
                path = self.job(node_rank) / name
                parts.append(f"--- {path.parent.name}/{name}\n{path.read_text() if path.exists() else ''}")
        return "\n".join(parts)[-12000:]

    def wait_for(self, text: str, node_rank: int = 0, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.out(node_rank):
            assert time.monotonic() < deadline, f"{text!r} did not appear:\n{self.all_output()}"
            assert self.agents[node_rank].poll() is None, f"the agent ended:\n{self.all_output()}"
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """All living processes of this gang, found by a mark in their environment."""
        wanted = f"{MARKER}={self.folder}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if wanted in environ.split(b"\0"):
                found.append(int(entry.name))
        return found

    def rank_pids(self, node_rank: int = 0) -> dict[int, int]:
        """Pids that the script of a test has printed as ``pid=N``, by rank."""
        found = {}
        for line in self.out(node_rank).splitlines():
            if "pid=" in line:
                found[int(line.split(" r")[1].split("]")[0])] = int(line.split("pid=")[1].split()[0])
        return found

    def stop(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
