"""Emulated hosts and jobs for the tests of what Airflow's tasks do with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from taas_tasks.airflow.host_job import HostJob, Wanted
from taas_tasks.airflow.hosts import OpenHosts, open_host
from taas_tasks.airflow.scope import Scope
from taas_tasks.compute import jobs
from taas_tasks.compute.inventory import Host, Inventory
from taas_tasks.compute.job import JobSpec
from taas_tasks.compute.processes import job_processes
from taas_tasks.store import ObjectStore
from taas_tasks.values import PlacedJob

GOOD = """printf '{"ok": true, "result": {}}' > "$TAAS_JOB_DIR/outcome.json" """
BAD = """
printf '{"ok": false, "error": {"type": "LoaderError", "message": "no such file", "fields": {}}}' \
  > "$TAAS_JOB_DIR/outcome.json"
"""
SCOPE = Scope("taas_train", "run-1", "prepare", 0, "try-1")


class MemoryDict:
    """What Airflow's ``task_state_store`` does, in a dict."""

    def __init__(self) -> None:
        self.kept: dict[str, JsonValue] = {}

    def get(self, key: str) -> JsonValue:
        return self.kept.get(key)

    def set(self, key: str, value: JsonValue) -> None:
        self.kept[key] = value


def inventory(folder: Path, *, gpu: int = 2, cpu: int = 2, slots: int = 1) -> Inventory:
    names = [(f"g2-{n}", "g2.8") for n in range(gpu)] + [(f"c1-{n}", "c1.4") for n in range(cpu)]
    return Inventory(
        hosts=[
            Host(name=name, flavor=flavor, root=str(folder / name), python=sys.executable, slots=slots)
            for name, flavor in names
        ]
    )


def stop_everything(inventory: Inventory) -> None:
    for host in inventory.hosts:
        folder = Path(host.root) / "jobs"
        for job in folder.iterdir() if folder.exists() else ():
            jobs.stop(open_host(host), job.name, wait_s=5)


def host_job(
    inventory: Inventory,
    store: ObjectStore,
    *,
    flavor: str = "c1.4",
    num_hosts: int = 1,
    scope: Scope = SCOPE,
    memory: MemoryDict | None = None,
) -> HostJob:
    candidates = inventory.of_flavor(flavor)
    return HostJob(
        scope=scope,
        wanted=Wanted(flavor, num_hosts, candidates),
        memory=memory or MemoryDict(),
        store=store,
        transports=OpenHosts().of(candidates),
    )


def shell(*scripts: str, owner: str = "try-1") -> Any:
    """Return a ``make_spec`` that runs one script per node (the last one for the rest)."""

    def make_spec(node_rank: int, job: PlacedJob) -> JobSpec:
        script = scripts[min(node_rank, len(scripts) - 1)]
        argv = ["/bin/sh", "-c", script]
        return JobSpec(job_id=job.job_id, owner=owner, argv=argv, slots_owner=job.job_id, kill_grace_s=1)

    return make_spec


def pids(inventory: Inventory, job: PlacedJob) -> list[int]:
    folder = Path(inventory.host(job.host).root) / "jobs" / job.job_id
    return [process.pid for process in job_processes(job.job_id, folder)]
