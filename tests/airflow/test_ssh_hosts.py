"""Jobs of tasks on hosts over SSH: the same steps as on local ones, programs from the engine, plain data everywhere."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas.errors import HostRefused, LaunchError, PrepareError
from taas_tasks.airflow.host_job import HostJob, program_spec
from taas_tasks.airflow.run_release import release_run
from taas_tasks.airflow.scope import Scope
from taas_tasks.airflow.train_task import emulates_gpus
from taas_tasks.airflow.triggers import HostJobTrigger, HostsTrigger
from taas_tasks.compute import jobs, program_start
from taas_tasks.compute.engine import engine
from taas_tasks.compute.inventory import Host, Inventory
from taas_tasks.compute.job import JobSpec
from taas_tasks.compute.jobs import Waiting
from taas_tasks.layout import HostPaths
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import PlacedJob, Placement
from tests.airflow.hosts import SCOPE, MemoryDict, host_job, pids, shell, stop_everything
from tests.airflow.test_hosts import KEYS, ssh_host
from tests.airflow.test_run_ends import deployment
from tests.airflow.test_triggers import Airflow, first_event
from tests.compute.hosts import until
from tests.compute.ssh_server import USER, SshServer, public
from tests.compute.test_ssh import HOSTILE, OTHER_KEY


@pytest.fixture(scope="module")
def server() -> Iterator[SshServer]:
    with SshServer() as server:
        yield server


@pytest.fixture
def hosts(airflow_db: None, server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inventory]:
    """Two hosts behind one server, each with a connection in Airflow."""
    for name in ("G2-0", "G2-1"):
        connect(monkeypatch, name, server)
    found = Inventory(hosts=[ssh_host(tmp_path / name, name=name) for name in ("g2-0", "g2-1")])
    yield found
    for name in ("G2-0", "G2-1"):
        connect(monkeypatch, name, server)
    stop_everything(found)


def connect(monkeypatch: pytest.MonkeyPatch, name: str, server: SshServer, **extra: str) -> None:
    value = {"conn_type": "ssh", "host": "127.0.0.1", "login": USER, "port": server.port, "extra": {**KEYS, **extra}}
    monkeypatch.setenv(f"AIRFLOW_CONN_TAAS_{name}", json.dumps(value))


def ended(job: HostJob, placement: Placement) -> list[jobs.JobState]:
    give_up = time.monotonic() + 60
    while (look := job.watch(placement).look()).any_lives:
        assert time.monotonic() < give_up
        time.sleep(0.1)
    assert None not in look.states
    return [state for state in look.states if state is not None]


def program_on(
    hosts: Inventory, *, module: str, input_json: str, env: dict[str, str]
) -> tuple[HostJob, Placement, JobSpec]:
    """Start a program on the first host."""
    job = host_job(hosts, MemoryStore(), flavor="g2.8")
    placement = job.place(job.find()[1])
    assert isinstance(placement, Placement)
    common = {"files": {}, "owner": "try-1", "timeout_s": 60}
    spec = program_spec(placement.jobs[0], hosts.hosts[0], module=module, input_json=input_json, env=env, **common)
    job.start(placement, lambda _rank, _placed: spec)
    return job, placement, spec


def test_a_gang_is_held_started_and_released(hosts: Inventory):
    job = host_job(hosts, MemoryStore(), flavor="g2.8", num_hosts=2)
    placement = job.place(job.find()[1])
    assert isinstance(placement, Placement)
    job.start(placement, shell("echo one", "echo two"))
    assert [state.succeeded for state in ended(job, placement)] == [True, True]
    other = host_job(hosts, MemoryStore(), flavor="g2.8", scope=dataclasses.replace(SCOPE, run_id="other"))
    waiting = other.place(other.find()[1])
    assert isinstance(waiting, Waiting) and waiting.reason == "waits for 1 of 1 g2.8; held by run run-1"
    job.release(placement)
    assert isinstance(other.place(other.find()[1]), Placement)


def test_a_program_runs_from_the_engine_and_says_what_is_wrong_with_its_input(hosts: Inventory):
    job, placement, spec = program_on(hosts, module="taas_tasks.prep.inspect_program", input_json="{}", env={})
    error = jobs.failure(ended(job, placement)[0], host="g2-0")
    assert isinstance(error, PrepareError) and "InspectInput" in error.message
    log = jobs.log(job.transports["g2-0"], spec.job_id).text
    assert str(HostPaths(Path(hosts.hosts[0].root)).engine(engine().digest) / "taas_tasks/prep/program.py") in log


def spec_on(host: Host, **more: object) -> tuple[list[str], dict[str, object]]:
    """Return the command of a program on a host, and what is to be made before it."""
    given = {"module": "m", "input_json": "{}", "files": {}, "env": {}, "owner": "o", "timeout_s": 1, **more}
    spec = program_spec(PlacedJob(host=host.name, job_id="j"), host, **given)
    return spec.argv, json.loads(spec.files.get(program_start.START_FILE, "null"))


def test_only_what_needs_something_made_is_started_by_program_start(tmp_path: Path):
    local = Host(name="l", flavor="c1.4", root="/r", python="/py")
    assert spec_on(local) == (["/py", "-m", "m", "{job}/input.json"], None)
    argv, start = spec_on(local, requirements=["einops==0.8.1"])
    assert argv == ["/py", "-I", program_start.__file__, "{job}"]
    assert start == {"module": "m", "envs": "/r/envs", "requirements": ["einops==0.8.1"], "engine": None}
    argv, start = spec_on(ssh_host(Path("/r")))
    home = f"/r/engines/{engine().digest}"
    assert argv == [sys.executable, "-I", f"{home}/taas_tasks/compute/program_start.py", "{job}"]
    assert start == {"module": "m", "envs": "/r/envs", "requirements": [], "engine": home}


def test_a_request_puts_its_paths_in_front_of_those_of_the_host():
    host = Host(name="l", flavor="c1.4", root="/r", python="/py", env={"PYTHONPATH": "/host", "A": "host"})
    placed = PlacedJob(host="l", job_id="j")
    given = {"module": "m", "input_json": "{}", "files": {}, "owner": "o", "timeout_s": 1}
    spec = program_spec(placed, host, env={"PYTHONPATH": "/request", "A": "request"}, **given)
    assert (spec.env["PYTHONPATH"], spec.env["A"]) == ("/request:/host", "request")


def test_hosts_of_one_training_must_agree_on_emulation():
    real, emulated = ssh_host(), ssh_host(name="g2-1", emulate_gpus=True)
    assert (emulates_gpus([real]), emulates_gpus([emulated, emulated])) == (False, True)
    with pytest.raises(LaunchError, match="g2-0 has GPUs, g2-1 emulates GPUs; set emulate_gpus alike"):
        emulates_gpus([real, emulated])


# ---- a host that must not be used any more ----


def test_a_changed_host_key_ends_the_wait_for_hosts_with_the_reason(
    hosts: Inventory, server: SshServer, monkeypatch: pytest.MonkeyPatch
):
    connect(monkeypatch, "G2-0", server, host_key=public(OTHER_KEY))
    placement = {"task_id": "train", "generation": 1, "flavor": "g2.8", "asked_at": 1.0}
    trigger = Airflow(hosts).trigger(HostsTrigger, **SCOPE.to_kwargs(), num_hosts=1, placement=placement)
    event = asyncio.run(first_event(trigger))
    assert event["status"] == "refused"
    assert event["reason"].startswith("host g2-0: ") and "another key" in event["reason"]


def test_a_changed_host_key_ends_following_and_a_mended_one_lets_a_retry_attach(
    hosts: Inventory, server: SshServer, monkeypatch: pytest.MonkeyPatch
):
    memory = MemoryDict()
    job = host_job(hosts, MemoryStore(), flavor="g2.8", memory=memory)
    placement = job.place(job.find()[1])
    assert isinstance(placement, Placement)
    job.start(placement, shell("sleep 60"))
    connect(monkeypatch, "G2-0", server, host_key=public(OTHER_KEY))
    placed = [one.model_dump() for one in placement.jobs]
    trigger = Airflow(hosts).trigger(HostJobTrigger, **SCOPE.to_kwargs(), jobs=placed, deadline=time.time() + 60)
    assert asyncio.run(first_event(trigger))["status"] == "refused"
    with pytest.raises(HostRefused, match="host g2-0"):
        host_job(hosts, MemoryStore(), flavor="g2.8", memory=memory).find()
    connect(monkeypatch, "G2-0", server)
    assert host_job(hosts, MemoryStore(), flavor="g2.8", memory=memory).find()[0] == "alive"


def test_one_refused_host_does_not_keep_release_from_the_others(
    hosts: Inventory, server: SshServer, monkeypatch: pytest.MonkeyPatch
):
    store = MemoryStore()
    scope = Scope("taas_train", "run-1", "train", -1, "try-1")
    job = host_job(hosts, store, flavor="g2.8", num_hosts=2, scope=scope)
    placement = job.place(job.find()[1])
    assert isinstance(placement, Placement)
    job.start(placement, shell("sleep 60"))
    connect(monkeypatch, "G2-0", server, host_key=public(OTHER_KEY))
    told = list(release_run(scope, deployment(hosts), store, {"train": "failed"}))
    assert any("another key" in line and "ends by itself when its lease runs out" in line for line in told)
    assert pids(hosts, placement.jobs[0]) and not pids(hosts, placement.jobs[1])


# ---- plain data ----


@pytest.mark.parametrize("value", HOSTILE)
def test_names_that_a_client_chooses_are_plain_data_on_the_host(hosts: Inventory, server: SshServer, value: str):
    scope = dataclasses.replace(SCOPE, run_id=value, owner=value)
    job = host_job(hosts, MemoryStore(), flavor="g2.8", scope=scope)
    placement = job.place(job.find()[1])
    assert isinstance(placement, Placement)
    job.start(placement, shell("true", owner=value))
    assert ended(job, placement)[0].succeeded
    table = job.transports["g2-0"].call("slots", {})["slots"]
    assert [slot["label"] for slot in table] == [f"run {value}"]
    root = Path(hosts.hosts[0].root).parent
    assert not list(root.rglob("x"))


def test_a_secret_is_in_no_command_no_argv_no_kwargs_and_no_log(hosts: Inventory, server: SshServer):
    secret = "s3cret-that-a-run-has"
    modules = Path(hosts.hosts[0].root).parent / "modules"
    modules.mkdir()
    (modules / "sleeper.py").write_text("import os, time; open('here', 'w').write(os.environ['TOKEN']); time.sleep(60)")
    env = {"TOKEN": secret, "PYTHONPATH": str(modules)}
    given = json.dumps({"secrets": {"TOKEN": secret}})
    job, placement, spec = program_on(hosts, module="sleeper", input_json=given, env=env)
    assert secret not in repr(spec)
    folder = HostPaths(Path(hosts.hosts[0].root)).job(spec.job_id)
    until(lambda: (folder / "here").exists() and (folder / "here").read_text() == secret)
    (folder / "here").unlink()
    shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists()]
    assert not [line for line in shown if secret.encode() in line]
    assert not [command for command in server.commands if secret in command]
    placed = [one.model_dump() for one in placement.jobs]
    trigger = HostJobTrigger(**SCOPE.to_kwargs(), jobs=placed, deadline=1.0)
    assert secret not in json.dumps(trigger.serialize()[1])
    jobs.stop(job.transports["g2-0"], spec.job_id, wait_s=20)
    assert secret not in jobs.log(job.transports["g2-0"], spec.job_id).text
    assert not [path for path in folder.rglob("*") if path.is_file() and secret in path.read_text()]
