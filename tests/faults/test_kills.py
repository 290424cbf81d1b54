"""Processes that are killed outright: nothing that they leave hinders the next, and no element is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from taas.errors import DeliveryError
from taas_tasks.layout import HostPaths, RunKeys
from taas_tasks.result_values import NodeResult
from taas_tasks.store import open_store
from tests.delivery.processes import ROOT, answers, feeder_process, stopped_at_the_end, wait_until
from tests.delivery.support import RUN, Prepared, ids, launch_plan
from tests.launch.conftest import MakeGang
from tests.launch.gang import Gang
from tests.launch.test_agent_program import DELIVERED
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.store


def test_a_rank_goes_on_where_its_loop_stood_with_the_next_feeder_however_far_the_killed_one_was(
    s3_server: S3Server, tmp_path: Path
) -> None:
    config = s3_server.fresh_config()
    prepared = Prepared(open_store(config), units=100, length=100).commit_all()
    plan = launch_plan(prepared, nproc=1)
    with feeder_process(config, plan, tmp_path) as (host, feeder):
        loader = host.loader(0)
        elements = iter(loader)
        taken = ids([next(elements) for _ in range(10)])
        state = loader.state_dict()
        wait_until(lambda: json.loads(host.stats_path.read_text())["delivered"]["data"] == 100)  # it is far ahead
        feeder.send_signal(signal.SIGKILL)
        feeder.wait(20)
        with pytest.raises(DeliveryError, match="has ended while this rank still needs data"):
            list(elements)
        assert list((host.folder / "cache").iterdir()) == []
        again = subprocess.Popen(
            [sys.executable, "-m", "taas_tasks.delivery.feeder", str(host.folder / "feeder.json")], text=True, cwd=ROOT
        )
        with stopped_at_the_end([again]):
            wait_until(lambda: answers(host.socket_path))
            resumed = host.loader(0)
            resumed.load_state_dict(state)
            rest = ids(resumed)
    assert taken + rest == [(0, index) for index in range(100)]


def leftovers() -> set[str]:
    """Names in the places where others could stumble over them."""
    shm = [path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")]
    return {str(path) for path in [*Path(tempfile.gettempdir()).glob("taas-*"), *shm]}


def test_the_next_try_on_a_host_whose_node_was_killed_outright_trains_and_nothing_is_left(make_gang: MakeGang) -> None:
    before = leftovers()

    def prepare(gang: Gang) -> None:
        prepared = Prepared(gang.store, units=8, length=8).commit_all()
        gang.plan["loaders"] = {"data": prepared.plan.model_dump()}

    gang = make_gang(DELIVERED, nproc=1, run=RUN, before=prepare, plan={"args": ["stay"]})
    gang.wait_for("ready")
    for pid in gang.processes():
        os.kill(pid, signal.SIGKILL)
    gang.agents[0].wait()
    wait_until(lambda: gang.processes() == [])

    given = json.loads((gang.job(0) / "input.json").read_text())
    given["generation"] = given["launch_plan"]["generation"] = 2
    given["launch_plan"]["args"] = []
    again = gang.folder / "again"
    again.mkdir()
    (again / "input.json").write_text(json.dumps(given))
    command = [sys.executable, "-m", "taas_tasks.launch.agent_program", str(again / "input.json")]
    with (again / "log").open("wb") as log:
        env = {**os.environ, "TAAS_TEST_GANG": str(gang.folder)}
        gang.agents.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env))
    assert gang.agents[1].wait(120) == 0, (again / "log").read_text()
    result = NodeResult.model_validate_json(gang.store.get(RunKeys(RUN).node_result(2, 0)))
    assert result.ok and result.delivered == {"data": 8}
    assert list(HostPaths(gang.host_root(0)).cache.iterdir()) == []
    assert not HostPaths(gang.host_root(0)).scratch(RUN, 1).exists()
    wait_until(lambda: leftovers() <= before)
