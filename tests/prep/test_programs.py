"""The programs as the hosts run them: own processes, a real S3 server, kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taas.errors import error_from_dict
from taas.flavors import FLAVORS
from taas.request import LoaderRef, TrainRequest
from taas_tasks import project
from taas_tasks.layout import RunKeys, run_key
from taas_tasks.plan import make_plan
from taas_tasks.prep import inspect_program, prepare_program
from taas_tasks.store import open_store
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import Inspection, PinnedRequest, Plan, StoreConfig
from tests.prep import oracle
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.store
RUN_ID = "manual__programs"
RUN = run_key(RUN_ID)
KEYS = RunKeys(RUN)
DATA = """
import random
import time
import numbers_of_mine
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for number in range(info.id, 30, info.num_workers):
            yield {"value": numbers_of_mine.OFFSET + number, "drawn": random.random()}

def make_streams():
    return DataLoader(Stream(), batch_size=2, num_workers=2, collate_fn=lambda rows: rows)

class Slow(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        time.sleep(0.01)
        return {"index": index, "value": numbers_of_mine.OFFSET + index / 2}

def make_loader():
    return DataLoader(Slow(), batch_size=2, shuffle=True, num_workers=1)

def breaks():
    raise RuntimeError("no such bucket")

def exits():
    raise SystemExit(3)
"""


class Hosts:
    """Runs programs as processes on one store and one project; ends them all."""

    def __init__(self, config: StoreConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.store = open_store(config)
        changes = {"data_in_programs.py": DATA.encode(), "numbers_of_mine.py": b"OFFSET = 1000\n"}
        project.commit(self.store, "demo", changes, author="ada")
        self.snapshot = project.head(self.store, "demo")[1]
        self.running: list[subprocess.Popen[bytes]] = []

    def input(self, **more: Any) -> dict[str, Any]:
        common = {
            "store": self.config.model_dump(),
            "run": RUN,
            "run_id": RUN_ID,
            "project": "demo",
            "snapshot": self.snapshot,
            "generation": 1,
            "host": "c1-0",
            "host_root": str(self.folder),
            "loader": "data",
        }
        return common | more

    def start(self, module: Any, name: str, **more: Any) -> tuple[subprocess.Popen[bytes], Path]:
        job = self.folder / name
        job.mkdir()
        (job / "input.json").write_text(json.dumps(self.input(**more)))
        with (job / "log").open("wb") as log:
            argv = [sys.executable, "-m", module.__name__, str(job / "input.json")]
            process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=Path(__file__).parents[2])
        self.running.append(process)
        return process, job

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def outcome(process: subprocess.Popen[bytes], job: Path) -> dict[str, Any]:
    assert process.wait(120) == 0, (job / "log").read_text()
    assert not (job / "project").exists()
    found: dict[str, Any] = json.loads((job / "outcome.json").read_text())
    return found


@pytest.fixture
def hosts(s3_server: S3Server, tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(s3_server.fresh_config(), tmp_path)
    yield made
    made.end()


def plan_of(hosts: Hosts, *, units: int, machines: int, name: str = "make_loader") -> Plan:
    source = f"data_in_programs.py:{name}"
    process, job = hosts.start(
        inspect_program, "inspect", source=source, seed=6, randomness="element", units=units, allow_pickle=False
    )
    assert outcome(process, job) == {"ok": True, "result": {"inspection": KEYS.inspection("data")}}
    inspection = Inspection.model_validate_json(hosts.store.get(KEYS.inspection("data")))
    loaders = {"data": LoaderRef(source=source)}
    request = TrainRequest(project="demo", script="t.py", cpus=machines, units=units, loaders=loaders, seed=6)
    pinned = PinnedRequest(run_id=RUN_ID, run=RUN, request=request, snapshot=hosts.snapshot, base_record=1)
    plan = make_plan(pinned, {"data": inspection}, FLAVORS)
    hosts.store.put(KEYS.plan, plan.to_bytes())
    return plan


def wait_for_records(store: ObjectStore, count: int) -> None:
    until = time.monotonic() + 60
    while len(list(store.list(KEYS.ledger("data")))) < count:
        assert time.monotonic() < until, "no record came"
        time.sleep(0.05)


def test_a_machine_killed_in_the_middle_loses_and_doubles_nothing(
    hosts: Hosts, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_of(hosts, units=60, machines=2)
    other, other_job = hosts.start(prepare_program, "m1", plan=KEYS.plan, machine=1)
    killed, job = hosts.start(prepare_program, "m0-g1", plan=KEYS.plan, machine=0)
    wait_for_records(hosts.store, 2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (job / "outcome.json").exists()
    again, again_job = hosts.start(prepare_program, "m0-g2", plan=KEYS.plan, machine=0, generation=2)
    results = [outcome(other, other_job), outcome(again, again_job)]
    assert all(found["ok"] for found in results), results
    stored = oracle.committed_stream(hosts.store, RUN, "data")
    oracle.assert_same_stream(stored.stream, local_stream(project, monkeypatch, "make_loader", units=60))
    oracle.assert_padding(stored)


def local_stream(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, units: int) -> list[oracle.Item]:
    """Return what the project's loader yields in this process."""
    (folder / "data_in_programs.py").write_text(DATA)
    (folder / "numbers_of_mine.py").write_text("OFFSET = 1000\n")
    monkeypatch.syspath_prepend(str(folder))
    import data_in_programs  # type: ignore[import-not-found]

    return oracle.local_stream(getattr(data_in_programs, name)(), seed=6, units=units)


def test_machines_share_the_loader_workers_of_an_iterable(
    hosts: Hosts, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(hosts, units=23, machines=3, name="make_streams")
    assert (plan.loaders["data"].num_streams, plan.loaders["data"].machines) == (2, 2)
    started = [hosts.start(prepare_program, f"m{machine}", plan=KEYS.plan, machine=machine) for machine in (0, 1)]
    results = [outcome(process, job) for process, job in started]
    assert all(found["ok"] for found in results), results
    stored = oracle.committed_stream(hosts.store, RUN, "data")
    oracle.assert_same_stream(stored.stream, local_stream(project, monkeypatch, "make_streams", units=23))


def test_an_aborted_run_ends_a_running_preparation(hosts: Hosts) -> None:
    plan_of(hosts, units=20_000, machines=1)
    process, job = hosts.start(prepare_program, "m0", plan=KEYS.plan, machine=0)
    wait_for_records(hosts.store, 1)
    assert hosts.store.put_if_absent(KEYS.abort, b"{}")
    found = outcome(process, job)
    assert not found["ok"]
    assert type(error_from_dict(found["error"])).__name__ == "RunCancelled"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("breaks", "calling data_in_programs.py:breaks failed: RuntimeError: no such bucket"),
        ("exits", "called exit(3)"),
    ],
)
def test_an_error_of_the_users_is_the_outcome(hosts: Hosts, name: str, message: str) -> None:
    process, job = hosts.start(
        inspect_program, name, source=f"data_in_programs.py:{name}", seed=0, randomness="element", units=5
    )
    found = outcome(process, job)
    assert found["error"]["type"] == "LoaderError"
    assert message in found["error"]["message"]
    assert f"def {name}" in found["error"]["fields"]["traceback"] or name in found["error"]["fields"]["traceback"]


def test_an_input_that_is_none_leaves_an_outcome_too(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "input.json"
    path.write_text("{}")
    cwd = Path.cwd()
    try:
        assert prepare_program.main([str(path)]) == 0
    finally:
        os.chdir(cwd)
    found = json.loads((tmp_path / "outcome.json").read_text())
    assert found["error"]["type"] == "PrepareError"
    assert "validation error" in found["error"]["message"]


def test_a_wrong_call_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_program.main([]) == 2
    assert "usage:" in capsys.readouterr().err
