"""Feeders and ranks as real processes, for tests; all are stopped when the test ends, also when it fails."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from taas_tasks.delivery import wire
from taas_tasks.values import LaunchPlan, StoreConfig
from tests.delivery.support import Host, new_host

ROOT = Path(__file__).parents[2]

PREAMBLE = """
import json, os, sys, warnings
import torch, torch.distributed as dist
import taas
from taas_tasks.delivery import install
from tests.delivery.support import ids
provider = install(sys.argv[1])
def say(value):
    print(json.dumps(value), flush=True)
"""
GLOO = PREAMBLE + "dist.init_process_group('gloo', init_method='env://')\n"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def stopped_at_the_end(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait(20)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@contextmanager
def feeder_process(config: StoreConfig, plan: LaunchPlan, folder: Path) -> Iterator[tuple[Host, subprocess.Popen[str]]]:
    """A host whose feeder is the real program."""
    with new_host(plan, folder) as host:
        given = {
            "store": config.model_dump(mode="json"),
            "launch_plan": plan.model_dump(mode="json"),
            "node_rank": 0,
            "socket": host.socket_path,
            "cache_dir": str(host.folder / "cache"),
            "stats_path": str(host.stats_path),
            "host": "host-0",
        }
        path = host.folder / "feeder.json"
        path.write_text(json.dumps(given))
        (host.folder / "plan.json").write_bytes(plan.to_bytes())
        with (host.folder / "feeder.log").open("w") as log:
            command = [sys.executable, "-m", "taas_tasks.delivery.feeder", str(path)]
            process = subprocess.Popen(command, stdout=log, stderr=log, text=True, cwd=ROOT)
        with stopped_at_the_end([process]):
            yield host, process


def start_ranks(host: Host, code: str, *, count: int, env: dict[str, str] | None = None) -> list[subprocess.Popen[str]]:
    """Start ranks that run ``code`` with their context file as argument; what they ``say`` is on their stdout."""
    port = str(free_port())
    processes = []
    for rank in range(count):
        context = host.folder / f"context-{rank}.json"
        context.write_text(
            json.dumps(
                {
                    "rank": rank,
                    "local_rank": rank,
                    "world_size": count,
                    "feeder_socket": host.socket_path,
                    "launch_plan_path": str(host.folder / "plan.json"),
                    "counters_dir": str(host.counters_dir),
                    "metrics_path": str(host.folder / "metrics.jsonl"),
                    "project_dir": str(host.folder),
                }
            )
        )
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        full = {
            **os.environ,
            **{name: str(value) for name, value in own.items()},
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        command = [sys.executable, "-c", code, str(context)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=full, cwd=ROOT))
    return processes


def said(process: subprocess.Popen[str], *, timeout_s: float = 90) -> list[Any]:
    """Wait for a rank to end well and return what it said."""
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err[-4000:]
    return [json.loads(line) for line in out.splitlines() if line[:1] in '[{"0123456789']


def answers(path: str) -> bool:
    """Whether a feeder listens there (a socket that a killed one left does not)."""
    with wire.new_socket() as one:
        try:
            one.connect(path)
        except OSError:
            return False
        return True


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
