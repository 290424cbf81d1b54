"""Requests with loaders on the real Airflow: prepared, gated, delivered, accounted for; and each step failing."""

from __future__ import annotations

import pytest

from tests.e2e.runs import Runs, job_processes

pytestmark = pytest.mark.stack

DATA = """
import time
import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __init__(self, fails_at=None):
        self.fails_at = fails_at

    def __len__(self):
        return 640

    def __getitem__(self, index):
        if index == self.fails_at:
            raise ValueError(f"item {index} is broken")
        return torch.tensor(index * index)


def make_loader():
    return DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1)


def breaks_at_once():
    raise FileNotFoundError("no data here")


def breaks_later():
    return DataLoader(Squares(fails_at=600), batch_size=4, num_workers=1)
"""
TRAIN = """
import torch
import torch.distributed as dist
import taas

dist.init_process_group(backend="nccl", init_method="env://")
seen = 0
for batch in taas.loader("data_loader"):
    seen += len(batch)
total = torch.tensor([seen])
dist.all_reduce(total)
if dist.get_rank() == 0:
    open("seen.txt", "w").write(str(int(total)))
    print("seen", int(total))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def project(runs: Runs) -> str:
    runs.project("loaders", {"data.py": DATA, "train.py": TRAIN})
    return "loaders"


def conf(project: str, source: str = "make_loader", **changes: object) -> dict[str, object]:
    loaders = {"data_loader": f"data.py:{source}"}
    return {"project": project, "script": "train.py", "gpus": 8, "cpus": 2, "units": 160, "loaders": loaders} | changes


def test_request_with_a_loader_is_prepared_delivered_and_accounted(runs: Runs, project: str):
    run_id = runs.start(conf(project), run_id="loaders-1")
    state = runs.finished(run_id, wait_s=300)
    assert state == "success", (runs.tasks(run_id), runs.log(run_id, "train")[-3000:])
    states = runs.tasks(run_id)
    assert set(states) == {
        "validate", "inspect_0", "plan", "prepare_0", "prepare_1", "gate", "train", "upload", "release", "report",
    }  # fmt: skip
    assert set(states.values()) == {"success"}
    account = runs.report(run_id)["loaders"]["data_loader"]
    asked = {name: account[name] for name in ("asked", "extracted", "committed", "delivered", "consumed")}
    assert asked == dict.fromkeys(asked, 160)
    assert account["explained"]
    (artifact,) = runs.get("/taas/runs/artifacts", run_id=run_id).json()["files"]
    assert (artifact["path"], artifact["bytes"]) == ("seen.txt", 3)
    status = runs.get("/taas/runs/status", run_id=run_id).json()
    assert status["prepared"] == {"data_loader": {"units": 160, "asked": 160}}
    assert runs.held_slots() == []


@pytest.mark.parametrize(
    ("name", "changes", "culprit", "words", "others"),
    [
        ("inspect", {"source": "breaks_at_once"}, "inspect_0", "no data here", {"plan": "upstream_failed"}),
        ("plan", {"max_cost": 1e-9}, "plan", "max_cost", {"train": "upstream_failed"}),
        ("prepare", {"source": "breaks_later", "start": "all"}, "prepare_", "item 600 is broken", {"gate": "failed"}),
    ],
)
def test_a_failing_step_fails_the_run(runs: Runs, project: str, name, changes, culprit, words, others):
    run_id = runs.start(conf(project, **changes), run_id=f"fails-in-{name}")
    assert runs.finished(run_id, wait_s=240) == "failed"
    states = runs.tasks(run_id)
    assert any(task.startswith(culprit) and state == "failed" for task, state in states.items()), states
    assert {task: states[task] for task in others} == others
    assert states["upload"] == "upstream_failed" and states["release"] == "success" and states["report"] == "failed"
    report = runs.report(run_id)
    assert report["state"] == "failed" and words in report["verdict"], report["verdict"]
    assert runs.held_slots() == [] and job_processes(run_id) == {}
