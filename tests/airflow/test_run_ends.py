"""The end of a run: what failed, what is still on hosts, what the client is told."""

from __future__ import annotations

import dataclasses

import pytest

from taas.errors import LaunchError, RequestError, StoreRefused
from taas.request import parse_request
from taas_tasks.airflow.deployment import Deployment, store_config
from taas_tasks.airflow.run_release import release_run
from taas_tasks.airflow.run_report import failed_tasks
from taas_tasks.airflow.run_status import TaskRow, phase_of, status_lines
from taas_tasks.airflow.run_steps import check_deployment
from taas_tasks.airflow.scope import Scope
from taas_tasks.compute.inventory import Inventory
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import JobRecord, StoreConfig
from tests.airflow.hosts import host_job, inventory, pids, shell, stop_everything

ALL_WELL = dict.fromkeys(("validate", "plan", "train", "upload", "release"), "success")


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"inspect": "skipped", "prepare": "skipped", "gate": "skipped"}, []),
        ({"release": "failed", "report": "running"}, []),
        ({"train": "failed", "upload": "upstream_failed"}, ["train"]),
        ({"gate": "failed", "prepare_1": "failed", "prepare_0": "success"}, ["prepare_1", "gate"]),
        ({"train": "upstream_failed", "upload": "upstream_failed"}, ["train", "upload"]),
        ({"train": None, "upload": "skipped"}, ["upload"]),
    ],
)
def test_what_made_a_run_fail(changes, failed):
    assert failed_tasks({**ALL_WELL, **changes}) == failed


@pytest.fixture
def hosts(tmp_path):
    found = inventory(tmp_path)
    yield found
    stop_everything(found)


def deployment(hosts: Inventory) -> Deployment:
    from taas.flavors import FLAVORS

    return Deployment(StoreConfig(bucket="b"), hosts, FLAVORS)


TRAIN = Scope("taas_train", "run-1", "train", -1, "try-1")


def running(hosts, store, scope=TRAIN):
    job = host_job(hosts, store, flavor="g2.8", num_hosts=2, scope=scope)
    placement = job.place(job.find()[1])
    job.start(placement, shell("sleep 60", owner=scope.owner))
    return placement


def test_release_ends_every_job_and_frees_the_hosts(hosts):
    store = MemoryStore()
    placement = running(hosts, store)
    release = dataclasses.replace(TRAIN, task_id="release")
    lines = list(release_run(release, deployment(hosts), store, {"train": "failed"}))
    assert len(lines) == 2
    assert [pids(hosts, job) for job in placement.jobs] == [[], []]
    again = host_job(hosts, store, flavor="g2.8", num_hosts=2, scope=dataclasses.replace(TRAIN, run_id="run-2"))
    assert again.place(again.find()[1]).jobs
    record = JobRecord.model_validate_json(store.get(TRAIN.keys.job_record(placement.jobs[0].job_id)))
    assert (record.ok, record.ended_by) == (False, "cancel")
    assert store.head(TRAIN.keys.abort) is not None
    assert list(release_run(release, deployment(hosts), store, {"train": "failed"})) == []


def test_release_leaves_a_task_that_is_at_work_again(hosts):
    store = MemoryStore()
    placement = running(hosts, store)
    list(release_run(TRAIN, deployment(hosts), store, {"train": "deferred"}))
    assert pids(hosts, placement.jobs[0])


def test_release_leaves_other_runs_alone(hosts):
    store = MemoryStore()
    placement = running(hosts, store, dataclasses.replace(TRAIN, run_id="another"))
    list(release_run(TRAIN, deployment(hosts), store, {"train": "failed"}))
    assert pids(hosts, placement.jobs[0])


def test_request_for_more_hosts_than_there_are_is_refused_with_both_numbers(hosts):
    request = parse_request({"project": "lm", "script": "t.py", "gpus": 32})
    with pytest.raises(RequestError, match=r"needs 4 hosts of g2\.8, the inventory has 2"):
        check_deployment(request, deployment(hosts))


def test_request_that_prepares_needs_a_cheap_host(tmp_path):
    loaders = {"x": "data.py:x"}
    request = parse_request({"project": "lm", "script": "t.py", "cpus": 1, "units": 5, "loaders": loaders})
    with pytest.raises(RequestError, match=r"cpus: needs 1 host of c1\.4, the inventory has 0"):
        check_deployment(request, deployment(inventory(tmp_path, cpu=0)))


def test_unknown_flavor_in_the_inventory_names_those_there_are(hosts):
    with pytest.raises(LaunchError, match=r"c1\.4, g2\.8"):
        hosts.of_flavor("g1.1")


@dataclasses.dataclass
class Connection:
    extra_dejson: dict[str, object]
    login: str | None = "key"
    password: str | None = "secret"


def test_store_connection_as_typed_values():
    extra = {"bucket": "taas", "endpoint_url": "http://x", "prefix": "", "other": 1}
    expected = StoreConfig(bucket="taas", endpoint_url="http://x", access_key="key", secret_key="secret")
    assert store_config(Connection(extra)) == expected


def test_store_connection_without_a_bucket_says_what_to_add():
    with pytest.raises(StoreRefused, match="names no bucket"):
        store_config(Connection({}))


def row(task_id: str, state: str | None, map_index: int = -1, label: str | None = None) -> TaskRow:
    return TaskRow(task_id, map_index, label, state, None, None)


@pytest.mark.parametrize(
    ("rows", "phase"),
    [
        ([], None),
        ([row("validate", "running")], "validate"),
        ([row("validate", "success"), row("inspect", "skipped"), row("train", "deferred")], "train"),
        ([row("prepare", "deferred", 0), row("gate", "deferred")], "gate"),
        ([row("upload", "success"), row("report", "success")], "report"),
    ],
)
def test_phase_of_a_run(rows, phase):
    assert phase_of(rows) == phase


def test_status_lines_are_in_the_order_of_the_steps():
    rows = [row("train", "deferred"), row("inspect", "success", 0, "data_loader"), row("gate", "skipped")]
    assert status_lines(rows) == ["inspect [data_loader]: success", "train: waiting"]
