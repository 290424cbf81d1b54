"""Gangs over several hosts, and what a finished job means."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from taas.errors import (
    HostUnreachable,
    JobFailed,
    JobLost,
    JobTimeout,
    LoaderError,
    RunCancelled,
    TaasError,
)
from taas_tasks.compute import jobs
from taas_tasks.compute.inventory import Host
from taas_tasks.compute.job import JobState
from taas_tasks.compute.jobs import GangHold, Waiting
from taas_tasks.compute.local import LocalTransport
from taas_tasks.compute.transport import Transport
from tests.compute.hosts import EmulatedHost


class Unreachable:
    """A host that never answers."""

    def call(self, verb: str, payload: dict[str, Any]) -> dict[str, Any]:
        raise HostUnreachable("no route to host")


def owners(hosts: list[Host], run: str) -> dict[str, str]:
    return {host.name: f"{run}-{host.name}" for host in hosts}


@pytest.fixture
def hosts(tmp_path: Path) -> list[Host]:
    return [
        Host(name=f"gpu-{number}", flavor="g2.8", root=str(tmp_path / f"gpu-{number}"), python="/usr/bin/python3")
        for number in range(4)
    ]


@pytest.fixture
def transports(hosts: list[Host]) -> dict[str, Transport]:
    return {host.name: LocalTransport(Path(host.root)) for host in hosts}


def take(
    hosts: list[Host], transports: Mapping[str, Transport], run: str, *, asked_at: float = 1, **more: Any
) -> GangHold | Waiting:
    return jobs.take_gang(hosts, transports, owners(hosts, run), hold_s=60, asked_at=asked_at, **more)


def holders(transports: Mapping[str, Transport]) -> list[str]:
    return [slot["owner"] for transport in transports.values() for slot in transport.call("slots", {})["slots"]]


def test_a_gang_takes_all_hosts_in_their_order(hosts: list[Host], transports: dict[str, Transport]):
    hold = take(hosts, transports, "run")
    assert isinstance(hold, GangHold)
    assert hold.hosts == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    assert hold.owners["gpu-2"] == "run-gpu-2"
    assert holders(transports) == [f"run-gpu-{number}" for number in range(4)]
    assert take(hosts, transports, "run") == hold


def test_a_gang_that_misses_a_host_holds_none_and_says_why(hosts: list[Host], transports: dict[str, Transport]):
    take(hosts[1:3], transports, "other")
    waiting = take(hosts, transports, "run")
    assert isinstance(waiting, Waiting)
    assert waiting.reason == "waits for 2 of 4 g2.8; held by other-gpu-1, other-gpu-2"
    assert waiting.missing == 2
    assert holders(transports) == ["other-gpu-1", "other-gpu-2"]


def test_who_holds_and_who_waits_are_told_by_their_labels(hosts: list[Host], transports: dict[str, Transport]):
    take(hosts[:2], transports, "other", label="run A")
    take(hosts, transports, "second", asked_at=2, label="run B")
    waiting = take(hosts, transports, "third", asked_at=3, label="run C")
    assert isinstance(waiting, Waiting)
    assert waiting.reason == "waits for 4 of 4 g2.8; held by run A; before it: run B"


def test_a_small_gang_takes_the_first_free_hosts_and_queues_nowhere(
    hosts: list[Host], transports: dict[str, Transport]
):
    take(hosts[:1], transports, "other")
    hold = take(hosts, transports, "run", num_hosts=2)
    assert isinstance(hold, GangHold) and hold.hosts == ["gpu-1", "gpu-2"]
    assert transports["gpu-0"].call("slots", {})["tickets"] == []
    again = take([hosts[1], hosts[2]], transports, "run")
    assert again == hold


def test_a_waiter_that_was_served_leaves_the_other_queues(hosts: list[Host], transports: dict[str, Transport]):
    hosts = hosts[:3]
    busy = take(hosts, transports, "busy")
    assert isinstance(busy, GangHold)
    assert isinstance(take(hosts, transports, "first", asked_at=2, num_hosts=1), Waiting)
    assert isinstance(take(hosts, transports, "second", asked_at=3, num_hosts=1), Waiting)
    jobs.release_gang(busy, transports)
    first, second = (take(hosts, transports, run, asked_at=2, num_hosts=1) for run in ("first", "second"))
    assert isinstance(first, GangHold) and first.hosts == ["gpu-0"]
    assert isinstance(second, GangHold) and second.hosts == ["gpu-1"]


def test_asking_again_when_an_earlier_host_came_free_holds_one_host(
    hosts: list[Host], transports: dict[str, Transport]
):
    busy = take(hosts[:1], transports, "busy")
    assert isinstance(busy, GangHold)
    before = take(hosts, transports, "run", num_hosts=1)
    assert isinstance(before, GangHold) and before.hosts == ["gpu-1"]
    jobs.release_gang(busy, transports)
    assert isinstance(take(hosts, transports, "run", num_hosts=1), GangHold)
    assert len(holders(transports)) == 1


def test_a_waiting_gang_is_not_overtaken(hosts: list[Host], transports: dict[str, Transport]):
    first = take(hosts[3:], transports, "first", asked_at=1)
    assert isinstance(take(hosts, transports, "big", asked_at=2), Waiting)
    small = take(hosts[:1], transports, "small", asked_at=3)
    assert isinstance(small, Waiting)
    assert small.reason == "waits for 1 of 1 g2.8; before it: big-gpu-0"
    assert isinstance(first, GangHold)
    jobs.release_gang(first, transports)
    assert isinstance(take(hosts, transports, "big", asked_at=2), GangHold)


def test_two_gangs_that_asked_in_different_orders_never_wait_for_each_other(
    hosts: list[Host], transports: dict[str, Transport]
):
    holds = [take([host], transports, f"old-{host.name}") for host in (hosts[0], hosts[3])]
    # B comes to the first host before A, A to the last before B
    take([hosts[0]], transports, "b", asked_at=2)
    take([hosts[3]], transports, "a", asked_at=1)
    take([hosts[0]], transports, "a", asked_at=1)
    take([hosts[3]], transports, "b", asked_at=2)
    for hold in holds:
        assert isinstance(hold, GangHold)
        jobs.release_gang(hold, transports)
    assert isinstance(take([hosts[0], hosts[3]], transports, "b", asked_at=2), Waiting)
    assert isinstance(take([hosts[0], hosts[3]], transports, "a", asked_at=1), GangHold)


def test_of_racing_gangs_exactly_one_wins(hosts: list[Host], transports: dict[str, Transport]):
    def race(number: int) -> GangHold | Waiting:
        for _ in range(20):
            answer = take(hosts, transports, f"run{number}", asked_at=number)
            if isinstance(answer, GangHold):
                break
        return answer

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(race, range(3)))
    assert sum(isinstance(answer, GangHold) for answer in answers) == 1
    assert len({owner.partition("-")[0] for owner in holders(transports)}) == 1
    assert len(holders(transports)) == 4


def test_a_host_that_does_not_answer_is_passed_over_or_named(hosts: list[Host], transports: dict[str, Transport]):
    transports["gpu-1"] = Unreachable()
    hold = take(hosts, transports, "run", num_hosts=3)
    assert isinstance(hold, GangHold) and hold.hosts == ["gpu-0", "gpu-2", "gpu-3"]
    assert jobs.release_gang(hold, transports) == []
    waiting = take(hosts, transports, "run")
    assert isinstance(waiting, Waiting)
    assert waiting.reason == "waits for 1 of 4 g2.8; no answer from gpu-1"
    assert waiting.unreachable == ["gpu-1"]
    assert jobs.withdraw(transports, owners(hosts, "run")) == ["gpu-1"]


def test_a_gang_that_withdraws_frees_hosts_and_places(hosts: list[Host], transports: dict[str, Transport]):
    take(hosts[:1], transports, "other")
    take(hosts, transports, "run")
    jobs.withdraw(transports, owners(hosts, "run"))
    assert isinstance(take(hosts[1:], transports, "next", asked_at=9), GangHold)


@pytest.mark.parametrize("num_hosts", [0, 5])
def test_a_gang_of_no_possible_size_is_refused(hosts: list[Host], transports: dict[str, Transport], num_hosts: int):
    with pytest.raises(ValueError, match=f"must be 1 to 4 .* got {num_hosts}"):
        take(hosts, transports, "run", num_hosts=num_hosts)


# ---- what a finished job means ----


def ended(**fields: Any) -> JobState:
    return JobState(job_id="job", phase="ended", **{"ended_by": "exit", **fields})


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        (ended(exit_code=3), JobFailed, "ended with exit code 3"),
        (ended(signal=11), JobFailed, "ended by signal 11"),
        (ended(signal=9, killed_by_kernel_suspected=True), JobFailed, r"by the kernel \(out of memory\?\)"),
        (ended(signal=9, oom_killed=True), JobFailed, "killed by the kernel: out of memory"),
        (
            ended(exit_code=127, error="the command 'x' cannot be started"),
            JobFailed,
            "could not start: the command 'x'",
        ),
        (ended(exit_code=0, ended_by="timeout"), JobTimeout, "ran longer than allowed"),
        (ended(signal=15, ended_by="lease"), JobTimeout, "nobody renewed its lease"),
        (ended(signal=15, ended_by="cancel", cancelled_by="try-1"), RunCancelled, "was cancelled by try-1"),
        (ended(signal=15, ended_by="shutdown"), JobLost, "the host stopped it"),
        (JobState(job_id="job", phase="lost"), JobLost, "its supervisor died"),
        (JobState(job_id="job", phase="tombstone", error="it was never started"), JobLost, "it was never started"),
        (JobState(job_id="job", phase="absent"), JobLost, "is lost"),
    ],
)
def test_a_failed_job_becomes_the_error_that_says_why(state: JobState, kind: type[TaasError], words: str):
    error = jobs.failure(state, host="gpu-1")
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error
    assert "job job on gpu-1" in error.message
    assert error.fields["host"] == "gpu-1"


def test_the_programs_own_verdict_goes_first():
    outcome = {"ok": False, "error": LoaderError("the dataset raised KeyError: 'x'", loader="a").to_dict()}
    error = jobs.failure(ended(exit_code=1, outcome=outcome), host="cpu-0")
    assert type(error) is LoaderError and error.fields == {"loader": "a"}
    assert type(jobs.failure(ended(signal=15, ended_by="timeout", outcome=outcome), host="cpu-0")) is JobTimeout


def test_a_job_that_succeeded_has_no_failure():
    assert jobs.failure(ended(exit_code=0, outcome={"ok": True, "result": {}}), host="h") is None
    assert jobs.failure(ended(exit_code=0), host="h") is None


def test_the_logs_end_is_quoted():
    error = jobs.failure(ended(exit_code=1), host="h", log_tail="line\nKeyError: 'x'\n")
    assert error is not None and error.message.endswith("its log ends with: line\nKeyError: 'x'")


def test_the_failure_of_a_live_job_is_not_known():
    with pytest.raises(ValueError, match="known when it is over"):
        jobs.failure(JobState(job_id="job", phase="running"), host="h")


def test_a_real_program_that_reports_an_error_gives_that_error(host: EmulatedHost):
    host.sh("""echo '{"ok": false, "error": {"type": "PrepareError", "message": "m"}}' > outcome.json; exit 1""")
    error = jobs.failure(host.ended(), host="h")
    assert error is not None and (type(error).__name__, error.message) == ("PrepareError", "m")
