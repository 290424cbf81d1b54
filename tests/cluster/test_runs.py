"""Requests on hosts over SSH: they train across them, share them, and are told the truth when one breaks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.demo import SOURCE_PREFIX, losses_of, put_sources
from taas_tasks.compute import jobs as on_host
from tests.cluster.runs import GANG, TRAIN, ClusterRuns
from tests.e2e.runs import until
from tests.e2e.test_stream import DATA, by_the_rule, received
from tests.e2e.test_stream import TRAIN as TELLS_WHAT_IT_RECEIVED
from tests.prep.oracle import local_stream

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]  # the first one starts the stack

EXAMPLES = Path(__file__).parents[2] / "examples"
SEED = 11
DDP = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(backend="nccl", init_method="env://")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 4))
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
if os.environ["GROUP_RANK"] == "0":
    dist.barrier()
    model.load_state_dict(torch.load("model.pt", weights_only=True))
else:
    dist.barrier()
    print("here:", os.path.exists("model.pt"))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def nothing_is_left(runs: ClusterRuns) -> Iterator[None]:
    yield
    runs.finish()  # what a failed test left behind must not hold the hosts of the next one
    until(lambda: not runs.held_slots(), wait_s=60)


def example(runs: ClusterRuns, name: str) -> dict[str, Any]:
    """Put an example's project; return its request."""
    request = json.loads((EXAMPLES / name / "request.json").read_text())
    runs.project(request["project"], {path.name: path.read_text() for path in (EXAMPLES / name).glob("*.py")})
    return dict(request)


def succeeded(runs: ClusterRuns, run_id: str) -> dict[str, Any]:
    assert runs.finished(run_id, wait_s=240) == "success", runs.log(run_id, "train")[-4000:]
    return runs.report(run_id)


def test_the_demos_requests_run_across_hosts(runs: ClusterRuns) -> None:
    config = runs.stack.store_config()
    put_sources(runs.stack)
    place = str(config.endpoint_url).removeprefix("http://")
    url = f"http://{config.access_key}:{config.secret_key}@{place}/{config.bucket}/{SOURCE_PREFIX}"
    assert runs.airflow("variables", "set", "taas/bytes-lm/source_secret", url).returncode == 0
    requests = {"bytes": {**example(runs, "bytes_lm"), "flavor": "g2.2", "gpus": 4}, "digits": example(runs, "digits")}
    assert requests["digits"]["gpus"] == 16  # 8 ranks on each of the two hosts, as it stands
    for run_id, request in requests.items():
        report = succeeded(runs, runs.start(request, run_id=run_id))
        account = report["loaders"]["data_loader"]
        assert (account["committed"], account["explained"]) == (request["units"], True)
        assert losses_of(report)[-1] < losses_of(report)[0]


def test_two_prep_hosts_and_two_training_hosts_deliver_the_local_stream(runs: ClusterRuns) -> None:
    runs.project("stream", {"data.py": DATA, "train.py": TELLS_WHAT_IT_RECEIVED})
    conf = {"project": "stream", **GANG, "cpus": 2, "units": 60, "seed": SEED}
    run_id = runs.start({**conf, "loaders": {"data_loader": "data.py:make_loader"}}, run_id="stream-1")
    succeeded(runs, run_id)
    names: dict[str, Any] = {}
    exec(DATA, names)
    local = local_stream(names["make_loader"](), seed=SEED, units=60)
    epochs = [[item.element[0].tolist() for item in local if item.epoch == epoch] for epoch in (0, 1)]
    expected = [by_the_rule(epoch, world_size=4) for epoch in epochs]
    assert received(runs, run_id) == [[epoch[rank] for epoch in expected] for rank in range(4)]


def test_rank_0_saves_barrier_all_load(runs: ClusterRuns) -> None:
    runs.project("ddp", {"train.py": DDP})
    report = succeeded(runs, runs.start({"project": "ddp", **GANG}, run_id="ddp-1"))
    assert [one["path"] for one in report["artifacts"]] == ["model.pt"]


def test_a_wrong_host_key_is_refused_and_nothing_starts(runs: ClusterRuns) -> None:
    runs.project("stranger", {"train.py": TRAIN})
    conf = {"project": "stranger", "script": "train.py", "flavor": "g1.1", "gpus": 1}
    run_id = runs.start(conf, run_id="stranger-1")
    assert runs.finished(run_id) == "failed"
    verdict = runs.report(run_id)["verdict"]
    assert "host stranger" in verdict and "is not the host that was pinned" in verdict
    assert "stranger" not in runs.cluster.exec("g2-0", ["ls", "-A", "/srv/taas"])


def test_two_requests_that_want_the_same_hosts_both_end_well(runs: ClusterRuns) -> None:
    runs.keep_on()
    ids = ["fight-1", "fight-2"]
    for run_id in ids:
        runs.project(run_id, {"train.py": TRAIN})
    for run_id in ids:
        runs.start({"project": run_id, **GANG}, run_id=run_id)
    waits = "waits for 2 of 2 g2.2; held by run"
    waiter = until(lambda: next((one for one in ids if waits in runs.log(one, "train")), None), wait_s=90)
    (holder,) = set(ids) - {waiter}
    assert f"{waits} {holder}" in runs.log(waiter, "train")
    runs.finish()
    for run_id in ids:
        assert [one["path"] for one in succeeded(runs, run_id)["artifacts"]] == ["model.txt"]


def test_cancelled_work_is_gone_everywhere_while_a_neighbour_lives(runs: ClusterRuns) -> None:
    neighbour = {"project": "neighbour", "script": "train.py", "flavor": "g2.1", "gpus": 1}
    runs.keep_on()
    runs.project("neighbour", {"train.py": TRAIN})
    runs.start(neighbour, run_id="neighbour-1")
    runs.trains("neighbour-1")

    def gone(run_id: str, generations: range) -> None:
        until(lambda: not runs.left_of(run_id, generations=generations), wait_s=30)

    run_id = runs.train("marked-1")
    assert {one.partition(":")[0] for one in runs.left_of(run_id)} == {"g2-0", "g2-1"}
    runs.mark(run_id, "train", "failed")
    gone(run_id, range(1, 5))
    assert runs.finished(run_id, wait_s=60) == "failed"

    run_id = runs.train("cleared-1")
    runs.clear(run_id, "train")
    gone(run_id, range(1, 2))
    until(lambda: runs.left_of(run_id, generations=range(2, 3)), wait_s=90)
    runs.mark_run(run_id, "failed")
    runs.delete(run_id)
    gone(run_id, range(1, 5))
    assert runs.state("neighbour-1") == "running"
    assert len(runs.held_slots()) == 1
    runs.finish()
    succeeded(runs, "neighbour-1")


@pytest.mark.parametrize("fault", ["killed", "cut off"])
def test_a_host_that_is_lost_is_named_within_a_minute_and_a_retry_works(runs: ClusterRuns, fault: str) -> None:
    run_id = runs.train(f"lost-{fault.split()[0]}")
    lost = "g2-1"
    (runs.cluster.kill if fault == "killed" else runs.cluster.cut_network)(lost)
    try:
        began = time.monotonic()
        until(lambda: runs.tasks(run_id)["train"] not in ("running", "deferred"), wait_s=75)
        assert time.monotonic() - began < 60
        said = runs.log(run_id, "train")
        assert "host lost" in said and lost in said, said[-3000:]
    finally:
        (runs.cluster.start if fault == "killed" else runs.cluster.mend_network)(lost)
    runs.finish()
    if runs.finished(run_id) == "failed":
        runs.clear(run_id, "train")
        until(lambda: runs.state(run_id) == "running", wait_s=30)
    assert [one["path"] for one in succeeded(runs, run_id)["artifacts"]] == ["model.txt"]


def test_airflow_that_never_comes_back_leaves_nothing_behind_its_lease(runs: ClusterRuns) -> None:
    run_id = runs.train("orphan-1")
    jobs = runs.job_ids(run_id, 1)
    hosts = [host for host in runs.hosts() if host.flavor == "g2.2"]
    try:
        runs.kill_airflow()
        for host in hosts:  # the lease that Airflow gives is 15 min: nobody waits for its end here
            on_host.renew(runs.transport(host), jobs[host.name], lease_s=10, owner="test", adopt=True)
        until(lambda: not runs.left_of(run_id), wait_s=70)
        states = [on_host.state(runs.transport(host), jobs[host.name]) for host in hosts]
        assert [state.ended_by for state in states] == ["lease", "lease"]
        until(lambda: not runs.held_slots(), wait_s=10)
    finally:
        runs.stack.up()
    runs.mark_run(run_id, "failed")
    assert runs.finished(run_id) == "failed"
