"""A short chaos run, and its parts: the schedule that a seed draws, what is judged wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.cluster.chaos import judge, schedule
from tests.cluster.chaos.__main__ import table
from tests.cluster.chaos.faults import Hit, HostProcess, is_target
from tests.cluster.chaos.judge import Ended
from tests.cluster.chaos.run import run
from tests.cluster.chaos.schedule import FAULT_KINDS, Wanted
from tests.cluster.runs import ClusterRuns

RIGHT = Ended(
    wanted=Wanted(0, "stream", 1, cpus=1, units=100),
    state="success",
    began_s=10,
    ended_s=50,
    report={
        "state": "success",
        "verdict": None,
        "loaders": {"data_loader": {"explained": True, "asked": 100, "committed": 100}},
    },
    result=[[1], [2]],
    expected=[[1], [2]],
    hashes_agree=True,
)
FAILED = replace(
    RIGHT, state="failed", result=None, report={"state": "failed", "verdict": "rank 1 on g2-0: killed by SIGKILL"}
)
KILLED_RANK = Hit("rank", "g2-0 pid 7", at_s=20, until_s=20)


def test_a_seed_draws_the_same_faults_and_requests_each_time_and_another_seed_draws_others():
    first, again, other = (list(itertools.islice(schedule.faults(seed), 40)) for seed in (3, 3, 4))
    assert first == again != other
    assert schedule.requests(3, 20) == schedule.requests(3, 20) != schedule.requests(4, 20)
    assert schedule.requests(3, 20)[:5] == schedule.requests(3, 5)


def test_every_kind_of_fault_comes_in_each_round_every_3_to_8_seconds():
    found = list(itertools.islice(schedule.faults(1), 2 * len(FAULT_KINDS)))
    for each_round in (found[: len(FAULT_KINDS)], found[len(FAULT_KINDS) :]):
        assert sorted(fault.kind for fault in each_round) == sorted(FAULT_KINDS)
    pauses = [after.at_s - before.at_s for before, after in itertools.pairwise(found)]
    assert 3 <= min(pauses) <= max(pauses) <= 8


def test_a_right_success_and_a_true_verdict_are_well():
    assert judge.faults_found(RIGHT, [KILLED_RANK]) == []
    assert judge.faults_found(FAILED, [KILLED_RANK]) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"state": "running"}, "has not ended: running"),
        ({"report": None}, "no report"),
        ({"result": [[2], [1]]}, "wrong result"),
        ({"hashes_agree": False}, "sha256"),
        ({"report": {"state": "failed", "verdict": "x", "loaders": {}}}, "report says failed: x"),
        ({"wanted": Wanted(0, "stream", 1, cpus=1, units=99)}, "does not close"),
    ],
)
def test_a_success_that_is_not_right_is_found(changes: dict[str, object], what: str):
    (found,) = judge.faults_found(replace(RIGHT, **changes), [])  # type: ignore[arg-type]
    assert what in found


@pytest.mark.parametrize(
    ("verdict", "hits", "what"),
    [
        ("killed by SIGKILL", [], "though nothing struck it"),
        ("killed by SIGKILL", [replace(KILLED_RANK, at_s=60, until_s=60)], "though nothing struck it"),
        ("Traceback (most recent call last):\n SIGKILL", [KILLED_RANK], "does not begin with a cause"),
        ("", [KILLED_RANK], "does not begin with a cause"),
        ("it did not feel like it", [KILLED_RANK], "names none of what struck it (rank)"),
    ],
)
def test_a_verdict_that_is_not_true_is_found(verdict: str, hits: list[Hit], what: str):
    ended = replace(FAILED, report={"state": "failed", "verdict": verdict})
    (found,) = judge.faults_found(ended, hits)
    assert what in found


def test_a_job_that_two_hosts_started_is_found():
    assert judge.started_twice({"a": ["one", "two"], "b": ["three"]}) == []
    assert judge.started_twice({"a": ["one"], "b": ["one"]}) == ["job one was started on a, b"]


def test_faults_hit_what_they_are_named_for():
    def process(command: str, job: str | None = "job") -> HostProcess:
        return HostProcess("g2-0", 1, 0, command, job)

    assert is_target("prep process", process("python -m taas_tasks.prep.prepare_program input.json"))
    assert is_target("node agent", process("python -m taas_tasks.launch.agent_program input.json"))
    assert not is_target("node agent", process("vi taas_tasks.launch.agent_program", job=None))
    assert is_target("supervisor", process("python /srv/taas/engine/x/taas_tasks/compute/supervisor.py /job", job=None))


@pytest.mark.timeout(900)
def test_three_requests_end_right_or_with_a_true_verdict_while_parts_die(runs: ClusterRuns):
    found = run(runs, seed=1, count=3)
    print(table(found))
    assert len(found.outcomes) == 3 and found.hits
    assert found.is_well
