"""kill -9 in the middle: nothing is launched twice, no unit is lost or doubled, the run finishes."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from taas_tasks.values import JobRecord, Placement, ShardRecord
from tests.e2e.runs import Runs, job_processes, until

pytestmark = pytest.mark.stack

DATA = """
import time
import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.tensor(index)


def make_loader():
    return DataLoader(Slow(), batch_size=1, shuffle=True)
"""
TRAIN = """
import time
import torch
import torch.distributed as dist
import taas

dist.init_process_group(backend="nccl", init_method="env://")
seen = torch.zeros(320, dtype=torch.int64)
for batch in taas.loader("data_loader"):
    seen[int(batch)] += 1
dist.all_reduce(seen)
if dist.get_rank() == 0:
    print("each once:", bool((seen == 1).all()), flush=True)
    time.sleep(8)
    open("once.txt", "w").write(str(bool((seen == 1).all())))
dist.barrier()
dist.destroy_process_group()
"""
PLAIN = """
import os, time
if os.environ["RANK"] == "0":
    with open("starts.txt", "a") as starts:
        starts.write("started\\n")
time.sleep(12)
"""


def placement(runs: Runs, run_id: str, task: str, map_index: int = -1) -> Placement | None:
    key = runs.keys(run_id).placement(task, map_index)
    if runs.store.head(key) is None:
        return None
    found = Placement.model_validate_json(runs.store.get(key))
    return found if found.jobs else None


def job_state(runs: Runs, found: Placement) -> dict[str, object]:
    host = next(host for host in runs.hosts() if host.name == found.jobs[0].host)
    path = Path(host.root) / "jobs" / found.jobs[0].job_id / "state.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def jobs_of(runs: Runs, run_id: str, task: str) -> list[JobRecord]:
    keys = runs.keys(run_id)
    records = [JobRecord.model_validate_json(runs.store.get(info.key)) for info in runs.store.list(keys.jobs)]
    return [record for record in records if record.task_id == task]


def test_killed_prep_program_supervisor_and_triggerer_lose_and_double_nothing(runs: Runs):
    runs.project("kills", {"data.py": DATA, "train.py": TRAIN})
    conf = {"project": "kills", "script": "train.py", "cpus": 2, "units": 320}
    run_id = runs.start({**conf, "loaders": {"data_loader": "data.py:make_loader"}}, run_id="kills-1")
    ledger = runs.keys(run_id).ledger("data_loader")
    until(lambda: len(list(runs.store.list(ledger))) >= 2, wait_s=180)

    program, other = placement(runs, run_id, "prepare", 0), placement(runs, run_id, "prepare", 1)
    assert program is not None and other is not None
    os.kill(int(str(job_state(runs, program)["pid"])), signal.SIGKILL)
    supervisor = job_state(runs, other)["supervisor"]
    os.kill(int(supervisor[0]), signal.SIGKILL)  # type: ignore[index]
    for map_index in (0, 1):
        until(
            lambda index=map_index: (p := placement(runs, run_id, "prepare", index)) and p.generation == 2, wait_s=120
        )

    until(lambda: placement(runs, run_id, "train"), wait_s=180)
    os.kill(runs.stack.pids()["triggerer"], signal.SIGKILL)
    runs.stack.restart("triggerer")

    assert runs.finished(run_id, wait_s=300) == "success", runs.tasks(run_id)
    records = [ShardRecord.model_validate_json(runs.store.get(info.key)) for info in runs.store.list(ledger)]
    covered = Counter(index for record in records for index in range(record.start, record.stop))
    assert covered == Counter(range(320))
    account = runs.report(run_id)["loaders"]["data_loader"]
    assert {account[name] for name in ("asked", "extracted", "committed", "delivered", "consumed")} == {320}
    assert "each once: True" in runs.rank_log(run_id)
    assert [record.generation for record in jobs_of(runs, run_id, "train")] == [1]
    assert runs.held_slots() == [] and job_processes(run_id) == {}


def task_process(runs: Runs, run_id: str, task: str) -> int:
    """The process in which Airflow runs a task: its title names the task instance."""
    found = runs.get(f"/api/v2/dags/taas_train/dagRuns/{run_id}/taskInstances/{task}").json()["id"]
    title = f"airflow worker -- {found}".encode()
    (pid,) = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if text_of(path).startswith(title)]
    return pid


def text_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_killed_task_process_attaches_to_its_job_on_retry(runs: Runs):
    runs.project("attach", {"train.py": PLAIN})
    run_id = runs.start({"project": "attach", "script": "train.py"}, run_id="attach-1")
    until(
        lambda: (p := placement(runs, run_id, "train")) and job_state(runs, p).get("phase") == "running",
        wait_s=90,
        every_s=0.05,
    )
    os.kill(task_process(runs, run_id, "train"), signal.SIGKILL)
    assert runs.finished(run_id, wait_s=240) == "success", runs.tasks(run_id)
    tries = runs.get(f"/api/v2/dags/taas_train/dagRuns/{run_id}/taskInstances/train").json()["try_number"]
    assert tries == 2
    assert [record.generation for record in jobs_of(runs, run_id, "train")] == [1]
    (artifact,) = runs.get("/taas/runs/artifacts", run_id=run_id).json()["files"]
    assert artifact["bytes"] == len("started\n")
    assert runs.held_slots() == []
