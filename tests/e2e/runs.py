"""What the end-to-end tests do: projects, runs, and what is left of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from taas_tasks import project as repository
from taas_tasks.airflow.hosts import open_host
from taas_tasks.compute.inventory import Host, Inventory
from taas_tasks.layout import RunKeys, run_key
from taas_tasks.stack import Stack
from taas_tasks.store import open_store

DAG = "taas_train"
GPU_HOSTS = 4
CPU_HOSTS = 2
RUNS = f"/api/v2/dags/{DAG}/dagRuns"


def until(condition: Callable[[], Any], *, wait_s: float, every_s: float = 0.3) -> Any:
    """Return the condition's first true value."""
    give_up = time.monotonic() + wait_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < give_up, f"not true within {wait_s} s"
        time.sleep(every_s)


class Runs:
    """A client of the stack, logged in as admin."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.store = open_store(stack.store_config())
        self._http = self.logged_in(stack.login)

    def __enter__(self) -> Runs:
        until(lambda: self.get(f"/api/v2/dags/{DAG}").status_code == 200, wait_s=60)
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def logged_in(self, login: tuple[str, str]) -> httpx.Client:
        client = httpx.Client(base_url=self.stack.url, timeout=30)
        reply = client.post("/auth/token", json={"username": login[0], "password": login[1]})
        client.headers["Authorization"] = f"Bearer {reply.raise_for_status().json()['access_token']}"
        return client

    def get(self, path: str, **params: Any) -> httpx.Response:
        return self._http.get(path, params=params)

    # --- making runs ---

    def project(self, name: str, files: Mapping[str, str]) -> None:
        changes = {path: text.encode() for path, text in files.items()}
        repository.commit(self.store, name, changes, author="tests")

    def trigger(self, conf: Mapping[str, Any], *, run_id: str) -> httpx.Response:
        return self._http.post(RUNS, json={"dag_run_id": run_id, "logical_date": None, "conf": dict(conf)})

    def start(self, conf: Mapping[str, Any], *, run_id: str) -> str:
        reply = self.trigger(conf, run_id=run_id)
        assert reply.status_code == 200, reply.text
        return run_id

    def airflow(self, *args: str, wait_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run Airflow's own command line on the stack."""
        command = [sys.executable, "-m", "airflow", *args]
        return subprocess.run(
            command, env=self.stack.environment(), capture_output=True, text=True, timeout=wait_s, check=False
        )

    # --- looking at runs ---

    def state(self, run_id: str) -> str:
        return str(self.get(f"{RUNS}/{run_id}").json()["state"])

    def finished(self, run_id: str, *, wait_s: float = 180) -> str:
        return str(until(lambda: (s := self.state(run_id)) in ("success", "failed") and s, wait_s=wait_s))

    def tasks(self, run_id: str) -> dict[str, str | None]:
        """The states of all tasks, mapped ones as ``prepare_0``."""
        found = self.get(f"{RUNS}/{run_id}/taskInstances", limit=200).json()["task_instances"]
        return {
            (one["task_id"] if one["map_index"] < 0 else f"{one['task_id']}_{one['map_index']}"): one["state"]
            for one in found
        }

    def wait_for(self, run_id: str, task: str, *states: str, wait_s: float = 120) -> None:
        until(lambda: self.tasks(run_id).get(task) in states, wait_s=wait_s)

    def mark(self, run_id: str, task: str, state: str) -> None:
        reply = self._http.patch(f"{RUNS}/{run_id}/taskInstances/{task}", json={"new_state": state})
        assert reply.status_code == 200, reply.text

    def clear(self, run_id: str, task: str) -> None:
        body = {"dry_run": False, "dag_run_id": run_id, "task_ids": [task], "only_failed": False}
        reply = self._http.post(f"/api/v2/dags/{DAG}/clearTaskInstances", json=body)
        assert reply.status_code == 200, reply.text

    def delete(self, run_id: str) -> None:
        assert self._http.delete(f"{RUNS}/{run_id}").status_code == 204

    def mark_run(self, run_id: str, state: str) -> None:
        assert self._http.patch(f"{RUNS}/{run_id}", json={"state": state}).status_code == 200

    def log(self, run_id: str, task: str, *, map_index: int = -1, tries: int = 1) -> str:
        path = f"{RUNS}/{run_id}/taskInstances/{task}/logs/{tries}"
        return self.get(path, map_index=map_index, full_content=True).text

    def rank_log(self, run_id: str, *, rank: int = 0) -> str:
        """What a rank has written so far."""
        text, cursor, before = "", "", None
        while cursor != before:
            reply = self.get("/taas/runs/logs", run_id=run_id, rank=rank, cursor=cursor).raise_for_status().json()
            before, cursor = cursor, reply["cursor"]
            text += "".join(one["text"] for one in reply["texts"])
        return text

    def report(self, run_id: str) -> dict[str, Any]:
        return dict(self.get("/taas/runs/report", run_id=run_id).raise_for_status().json())

    def keys(self, run_id: str) -> RunKeys:
        return RunKeys(run_key(run_id))

    # --- looking at hosts ---

    def hosts(self) -> list[Host]:
        return Inventory.model_validate(self.stack.inventory).hosts

    def held_slots(self) -> list[str]:
        held = []
        for host in self.hosts():
            if Path(host.root).exists():
                held += [slot["owner"] for slot in open_host(host).call("slots", {})["slots"]]
        return held

    def print_logs(self) -> None:
        for name in ("scheduler", "triggerer", "api-server", "dag-processor"):
            print(f"----- {name}\n{self.stack.log(name).read_text()[-6000:]}")


def job_processes(run_words: str = "") -> dict[int, str]:
    """Every process that carries a job's mark, by pid: its job id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for entry in environment:
            if entry.startswith(b"TAAS_JOB_ID=") and run_words.encode() in b"\0".join(environment):
                found[int(folder.name)] = entry.partition(b"=")[2].decode()
    return found
