"""A chaos run, from an empty cluster to what is said of it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from taas_tasks.stack import Stack
from tests.cluster.chaos import judge, requests, schedule
from tests.cluster.chaos.faults import Harm, Hit, processes_on, task_processes
from tests.cluster.chaos.judge import Ended
from tests.cluster.chaos.schedule import FaultKind, Wanted
from tests.cluster.cluster import ROOT, Cluster
from tests.cluster.runs import ClusterRuns
from tests.e2e.runs import Runs

IN_FLIGHT = 3
REQUEST_BOUND_S = 600.0
PROJECT = "chaos"
_SERVICES: Mapping[FaultKind, str] = {"triggerer": "triggerer", "scheduler": "scheduler", "S3 server": "s3"}
_STARTED = """
import json, pathlib, sys
found = []
for state in pathlib.Path(sys.argv[1]).glob("**/jobs/*/state.json"):
    if json.loads(state.read_text()).get("started_at"):
        found.append(state.parent.name)
print(json.dumps(found))
"""


@dataclass
class Outcome:
    """What became of one request, and what is wrong with that (nothing, when all is well)."""

    request: str
    wanted: Wanted
    state: str | None
    seconds: float
    verdict: str | None
    struck_by: list[str]
    wrong: list[str]


@dataclass
class Chaos:
    """A run. ``wrong``: what is wrong beyond single requests."""

    seed: int
    outcomes: list[Outcome]
    hits: list[Hit]
    missed: Mapping[str, int]
    wrong: list[str] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong and not any(outcome.wrong for outcome in self.outcomes)

    def to_json(self) -> str:
        """Return all of it."""
        return json.dumps(asdict(self), indent=1)


def run(runs: ClusterRuns, *, seed: int, count: int) -> Chaos:
    """Run ``count`` requests while the faults of ``seed`` strike the cluster and the stack; all are well at the end."""
    runs.project(PROJECT, requests.FILES)
    before = _started(runs.cluster)
    harm = Harm(runs.cluster, _services(runs.stack), lambda: _task_processes(runs))
    done = threading.Event()
    striking = threading.Thread(target=_strike, args=(harm, seed, done), name="faults")
    striking.start()
    try:
        ended = _run_requests(runs, harm, schedule.requests(seed, count))
    finally:
        done.set()
        striking.join()
        harm.mend_all()
    outcomes = [_outcome(each, harm.hits) for each in ended]
    started = {host: sorted({*jobs} - {*before[host]}) for host, jobs in _started(runs.cluster).items()}
    missed = {kind: harm.missed.count(kind) for kind in sorted(set(harm.missed))}
    return Chaos(seed, outcomes, harm.hits, missed, [*_left(runs), *judge.started_twice(started)])


@contextmanager
def world(folder: Path) -> Iterator[ClusterRuns]:
    """Make a cluster, and a stack that drives it, below a folder; both are gone at the end."""
    with ExitStack() as exits:
        cluster = exits.enter_context(Cluster(folder / "cluster"))
        stack = Stack(
            folder / "stack",
            inventory=cluster.inventory(),
            connections=cluster.connections(),
            s3_address=cluster.gateway,
            supervise=True,
        )
        exits.callback(stack.drop_database)
        exits.callback(stack.down)
        stack.up()
        yield exits.enter_context(ClusterRuns(stack, cluster))


def _services(stack: Stack) -> dict[FaultKind, Callable[[], None]]:
    def kill(name: str) -> None:
        os.kill(stack.pids()[name], signal.SIGKILL)
        stack.restart(name)

    return {kind: partial(kill, name) for kind, name in _SERVICES.items()}


def _strike(harm: Harm, seed: int, done: threading.Event) -> None:
    for fault in schedule.faults(seed):
        if done.wait(max(0.0, fault.at_s - harm.now_s())):
            return
        harm.apply(fault)


def _task_processes(runs: Runs) -> dict[str, int]:
    found = runs.get("/api/v2/dags/taas_train/dagRuns/~/taskInstances", state="running", limit=100)
    instances = found.json().get("task_instances", []) if found.status_code == 200 else []
    return task_processes({f"{one['dag_run_id']} {one['task_id']}": one["id"] for one in instances})


# --- requests ---


@dataclass
class _Flying:
    wanted: Wanted
    run_id: str
    began_s: float


def _run_requests(runs: Runs, harm: Harm, wanted: list[Wanted]) -> list[Ended]:
    """Keep some requests in flight until all have ended, or are overdue."""
    waiting, flying, ended = list(wanted), [], []
    while waiting or flying:
        while waiting and len(flying) < IN_FLIGHT:
            flying.append(_begin(runs, harm, waiting.pop(0)))
        time.sleep(1)
        for each in list(flying):
            state = _state(runs, each.run_id)
            if state in ("success", "failed") or harm.now_s() - each.began_s > REQUEST_BOUND_S:
                flying.remove(each)
                ended.append(_look(runs, harm, each, state))
                print(f"[{harm.now_s():6.0f} s] {each.run_id} {each.wanted}: {state}", flush=True)
    return ended


def _begin(runs: Runs, harm: Harm, wanted: Wanted) -> _Flying:
    run_id = f"chaos-{wanted.number}-{wanted.kind}"
    runs.start(requests.conf(wanted, project=PROJECT), run_id=run_id)
    return _Flying(wanted, run_id, harm.now_s())


def _state(runs: Runs, run_id: str) -> str | None:
    try:
        return runs.state(run_id)
    except (httpx.HTTPError, KeyError, ValueError):
        return None


def _look(runs: Runs, harm: Harm, flying: _Flying, state: str | None) -> Ended:
    ended_s = harm.now_s()
    give_up = time.monotonic() + 60  # the S3 server may be away at this moment
    while True:
        try:
            result, agree = _result(runs, flying.run_id) if state == "success" else (None, True)
            report = runs.report(flying.run_id)
            break
        except (httpx.HTTPError, OSError, ValueError):
            if time.monotonic() > give_up:
                report, result, agree = None, None, False
                break
            time.sleep(2)
    expected = requests.expected(flying.wanted)
    return Ended(flying.wanted, state, flying.began_s, ended_s, report, result, expected, agree)


def _result(runs: Runs, run_id: str) -> tuple[Any, bool]:
    """Return what rank 0 wrote as its result, and whether every artifact has the content that its record says."""
    result, agree = None, True
    for artifact in runs.get("/taas/runs/artifacts", run_id=run_id).raise_for_status().json()["files"]:
        with urllib.request.urlopen(artifact["url"], timeout=30) as reply:
            data = reply.read()
        agree = agree and hashlib.sha256(data).hexdigest() == artifact["sha256"]
        if artifact["path"] == "result.json":
            result = json.loads(data)
    return result, agree


def _outcome(ended: Ended, hits: list[Hit]) -> Outcome:
    struck = sorted({hit.kind for hit in judge.faults_of(ended, hits)})
    verdict = None if ended.report is None else ended.report["verdict"]
    name = f"chaos-{ended.wanted.number}-{ended.wanted.kind}"
    wrong = judge.faults_found(ended, hits)
    return Outcome(name, ended.wanted, ended.state, ended.ended_s - ended.began_s, verdict, list(struck), wrong)


# --- what is left ---


def _left(runs: ClusterRuns) -> list[str]:
    """Return what is left of runs that are over, once what was to end had the time that it may take."""
    give_up = time.monotonic() + 60
    while (found := [*_left_processes(runs.cluster), *_held(runs)]) and time.monotonic() < give_up:
        time.sleep(2)
    return found


def _left_processes(cluster: Cluster) -> list[str]:
    return [
        f"{process.command} ({process.pid}) is left on {host.name}"
        for host in cluster.hosts
        for process in processes_on(cluster, host.name)
        if process.job is not None
    ]


def _held(runs: ClusterRuns) -> list[str]:
    return [f"a slot is still held by {owner}" for owner in runs.held_slots()]


def _started(cluster: Cluster) -> dict[str, list[str]]:
    """Return the ids of the jobs that each host has started."""
    return {host.name: json.loads(cluster.exec(host.name, ["python3", "-c", _STARTED, ROOT])) for host in cluster.hosts}
