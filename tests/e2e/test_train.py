"""Requests without loaders on the real Airflow, and what is left when a user stops one."""

from __future__ import annotations

import time

import pytest

from tests.e2e.runs import Runs, job_processes, until

pytestmark = pytest.mark.stack

TRAIN = """
import os
import torch
import torch.distributed as dist

dist.init_process_group(backend="nccl", init_method="env://")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("ranks", int(total.item()), "secret", len(os.environ["TOKEN"]))
    open("model.txt", "w").write(f"trained by {int(total.item())}")
dist.destroy_process_group()
"""
SLEEPS = """
import time
print("sleeping now", flush=True)
time.sleep(600)
"""
FAILS = """
import os, sys
if os.environ["RANK"] == "3":
    raise ValueError("the third rank is out of luck")
import time
time.sleep(600)
"""


def test_request_without_loaders_trains(runs: Runs):
    runs.project("plain", {"train.py": TRAIN})
    assert runs.airflow("variables", "set", "taas/plain/token", "s3cr3t-token-value").returncode == 0
    conf = {"project": "plain", "script": "train.py", "gpus": 8, "secrets": {"TOKEN": "var:taas/plain/token"}}
    run_id = runs.start(conf, run_id="plain-1")
    state = runs.finished(run_id)
    assert state == "success", runs.log(run_id, "train")[-3000:]
    assert runs.tasks(run_id) == {
        "validate": "success",
        "inspect": "skipped",
        "plan": "success",
        "prepare": "skipped",
        "gate": "skipped",
        "train": "success",
        "upload": "success",
        "release": "success",
        "report": "success",
    }
    report = runs.report(run_id)
    assert report["state"] == "success"
    assert [one["path"] for one in report["artifacts"]] == ["model.txt"]
    (artifact,) = runs.get("/taas/runs/artifacts", run_id=run_id).json()["files"]
    assert artifact["bytes"] == len("trained by 8")
    log = runs.get("/taas/runs/logs", run_id=run_id, rank=0).json()
    assert "ranks 8 secret 18" in log["texts"][0]["text"]
    assert runs.get("/taas/runs/logs", run_id=run_id, rank=0, cursor=log["cursor"]).json()["complete"]
    assert "ranks 8" in runs.log(run_id, "train")
    phases = {phase["name"]: phase for phase in report["phases"]}
    assert phases["train"]["cost_units"] > 0 and phases["validate"]["seconds"] >= 0
    assert runs.held_slots() == []


def test_secret_is_in_no_log_and_no_row(runs: Runs):
    for task in ("validate", "train", "upload", "report"):
        assert "s3cr3t-token-value" not in runs.log("plain-1", task)
    for path in ("taskInstances/train/xcomEntries", "taskInstances/train"):
        assert "s3cr3t" not in runs.get(f"/api/v2/dags/taas_train/dagRuns/plain-1/{path}").text


def test_failing_rank_fails_the_run_with_its_words(runs: Runs):
    runs.project("fails", {"train.py": FAILS})
    run_id = runs.start({"project": "fails", "script": "train.py", "gpus": 8}, run_id="fails-1")
    assert runs.finished(run_id) == "failed"
    states = runs.tasks(run_id)
    assert states["train"] == "failed" and states["upload"] == "upstream_failed"
    assert states["release"] == "success" and states["report"] == "failed"
    report = runs.report(run_id)
    assert report["state"] == "failed"
    assert "rank 3" in report["verdict"] and "the third rank is out of luck" in report["verdict"]
    assert runs.held_slots() == [] and job_processes(run_id) == {}


@pytest.mark.parametrize("what", ["task", "run"])
def test_user_stops_a_training_and_nothing_is_left(runs: Runs, what: str):
    runs.project("sleeps", {"train.py": SLEEPS})
    run_id = runs.start({"project": "sleeps", "script": "train.py", "gpus": 16}, run_id=f"stopped-{what}")
    until(lambda: "sleeping now" in runs.log(run_id, "train"), wait_s=120)
    assert len(runs.held_slots()) == 2
    began = time.monotonic()
    if what == "task":
        runs.mark(run_id, "train", "failed")
    else:
        runs.mark_run(run_id, "failed")
    until(lambda: not job_processes(run_id), wait_s=30)
    assert time.monotonic() - began < 30
    assert runs.finished(run_id, wait_s=60) == "failed"
    until(lambda: runs.tasks(run_id)["report"] == "failed", wait_s=60)
    assert runs.held_slots() == []
    assert runs.tasks(run_id)["upload"] in ("upstream_failed", "skipped")
