"""The DAG file: its exact shape, and that parsing it costs nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAP = {
    # task: (trigger rule, is mapped, is teardown, downstream)
    "validate": ("all_success", False, False, {"inspect"}),
    "inspect": ("all_success", True, False, {"plan"}),
    "plan": ("none_failed", False, False, {"prepare", "gate"}),
    "prepare": ("all_success", True, False, {"release"}),
    "gate": ("all_success", False, False, {"train"}),
    "train": ("none_failed", False, False, {"upload"}),
    "upload": ("all_success", False, False, {"release"}),
    "release": ("all_done_setup_success", False, True, {"report"}),
    "report": ("all_done_setup_success", False, True, set()),
}


@pytest.fixture(scope="module")
def dag():
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(dag_folder=str(ROOT / "dags" / "taas_train.py"))
    assert bag.import_errors == {}
    return bag.dags["taas_train"]


def test_task_map_is_exactly_this(dag):
    found = {
        task.task_id: (str(task.trigger_rule.value), task.is_mapped, task.is_teardown, set(task.downstream_task_ids))
        for task in dag.tasks
    }
    assert found == MAP


def test_only_the_report_decides_the_run(dag):
    assert {task.task_id for task in dag.tasks if task.on_failure_fail_dagrun} == {"report"}


def test_gate_does_not_wait_for_prepare(dag):
    assert "prepare" not in dag.get_task("gate").get_flat_relative_ids(upstream=True)


def test_every_task_retries_what_a_retry_can_mend(dag):
    from taas.errors import HostUnreachable, LoaderError, RequestError, StoreUnavailable

    for task in dag.tasks:
        policy = (task.partial_kwargs if task.is_mapped else vars(task))["retry_policy"]
        for error in (HostUnreachable("x"), StoreUnavailable("x")):
            assert policy.evaluate(error, 1, 3).action.value == "retry", task.task_id
        for error in (RequestError("x"), LoaderError("x")):
            assert policy.evaluate(error, 1, 3).action.value == "fail", task.task_id
        assert policy.evaluate(OSError("x"), 1, 3).action.value == "default", task.task_id


def test_dag_survives_serialisation(dag):
    from airflow.serialization.serialized_objects import DagSerialization

    text = json.dumps(DagSerialization.to_dict(dag))
    again = DagSerialization.from_dict(json.loads(text))
    assert {task.task_id for task in again.tasks} == set(MAP)


PARSE = """
import json, sys, time
from airflow.sdk import DAG, BaseOperator, BaseSensorOperator, Param
with DAG("any", schedule=None, params={"x": Param(1)}):
    BaseOperator(task_id="a") >> BaseSensorOperator(task_id="b")
before = set(sys.modules)
start = time.process_time()
import taas_train
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before), "all": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    environment = {"PATH": "/usr/bin:/bin", "AIRFLOW_HOME": str(home), "PYTHONPATH": str(ROOT / "dags")}
    best = None
    for _ in range(3):  # the first run may compile
        done = subprocess.run(
            [sys.executable, "-c", PARSE], env=environment, cwd=home, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout.splitlines()[-1])
        best = seen if best is None or seen["seconds"] < best["seconds"] else best
    return best


def test_parsing_takes_under_a_tenth_of_a_second_above_airflow(parsed):
    assert parsed["seconds"] < 0.1


@pytest.mark.parametrize("heavy", ["torch", "numpy", "boto3", "botocore", "paramiko", "pyarrow", "cloudpickle"])
def test_parsing_imports_nothing_heavy(parsed, heavy):
    assert heavy not in parsed["all"]


def test_parsing_needs_no_database(parsed):
    assert not [name for name in parsed["new"] if name.startswith("airflow.models")]
