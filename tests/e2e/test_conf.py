"""A wrong conf is refused in our words on every way into the real Airflow, and nothing runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from tests.e2e.runs import RUNS, Runs

pytestmark = pytest.mark.stack

BAD = {"project": "conf", "script": "train.py", "gpu": 8, "flavor": "g2.9", "units": 5}
FAULTS = [
    "gpu: unknown field",
    "Did you mean 'gpus'?",
    "unknown flavor 'g2.9'",
    "cpus: is missing while units is given",
]


def test_rest_answers_400_with_every_fault(runs: Runs):
    reply = runs.trigger(BAD, run_id="bad-rest")
    assert reply.status_code == 400
    for fault in FAULTS:
        assert fault in reply.json()["detail"]
    assert runs.get(f"{RUNS}/bad-rest").status_code == 404


def test_command_line_ends_with_our_sentences(runs: Runs):
    done = runs.airflow("dags", "trigger", "taas_train", "--run-id", "bad-cli", "--conf", json.dumps(BAD))
    assert done.returncode != 0
    said = done.stderr.strip().splitlines()
    for fault in FAULTS:
        assert any(fault in line for line in said[-6:]), done.stderr[-2000:]
    assert runs.get(f"{RUNS}/bad-cli").status_code == 404


@pytest.mark.parametrize(
    ("conf", "fault"),
    [
        ({}, "project: is missing"),
        ({"project": "conf", "script": "train.py", "gpus": "eight"}, "gpus: got"),
        ({"project": "conf", "script": "train.py", "gpus": 12}, "gpus: got 12; allowed on g2.8: 8, 16, 32"),
        ({"project": "conf", "script": "train.py", "env": {"API_TOKEN": "ghp_" + "a1B2" * 9}}, "looks like a secret"),
        ({"project": "conf", "script": "../train.py"}, "script: got"),
        ({"project": "conf", "script": "train.py", "loaders": {"x": {"payload": "p"}}}, "payload and sha256 together"),
    ],
)
def test_each_kind_of_fault_is_refused_by_rest(runs: Runs, conf, fault):
    reply = runs.trigger(conf, run_id="bad-kind")
    assert reply.status_code == 400
    assert fault in reply.json()["detail"]


def test_script_that_the_project_lacks_fails_validate_before_a_machine_is_taken(runs: Runs):
    runs.project("empty", {"other.py": "pass\n"})
    run_id = runs.start({"project": "empty", "script": "train.py"}, run_id="no-script")
    assert runs.finished(run_id) == "failed"
    states = runs.tasks(run_id)
    assert states["validate"] == "failed" and states["train"] == "upstream_failed"
    assert states["release"] == "success" and states["report"] == "failed"
    assert "project 'empty' has no file 'train.py'" in runs.report(run_id)["verdict"]
    assert runs.held_slots() == []


def test_airflows_own_command_works_in_the_environment_that_taas_env_prints(runs: Runs):
    root = shlex.quote(str(runs.stack.files.root))
    python = shlex.quote(sys.executable)
    script = f'eval "$({python} -m taas_tasks.stack env --root {root})"; {python} -m airflow dags list --output json'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert '"taas_train"' in done.stdout
