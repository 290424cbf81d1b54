"""What is shown of the logs of several jobs: fairly, and within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from taas.errors import HostUnreachable
from taas_tasks.airflow.job_watch import JobWatch
from taas_tasks.values import PlacedJob

JOBS = [PlacedJob(host=f"h{n}", job_id=f"j{n}") for n in range(3)]


class Host:
    """A host whose job has written ``log``; counts what is asked."""

    def __init__(self, log: str = "") -> None:
        self.log = log.encode()
        self.is_silent = False
        self.asked: list[str] = []

    def call(self, verb: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(verb)
        if self.is_silent:
            raise HostUnreachable("the host does not answer")
        if verb == "log":
            data = self.log[payload["offset"] : payload["offset"] + payload["limit"]]
            return {"text": data.decode(), "next_offset": payload["offset"] + len(data), "size": len(self.log)}
        return {"job_id": payload["job_id"], "phase": "running", "owner": "me", "log_bytes": len(self.log)}


@pytest.fixture
def hosts() -> list[Host]:
    return [Host("zero\n"), Host("one\n"), Host("two\nunfini")]


def watch_of(hosts: list[Host]) -> JobWatch:
    return JobWatch(transports={job.host: host for job, host in zip(JOBS, hosts, strict=True)}, jobs=JOBS, owner="me")


def test_new_lines_of_all_jobs_are_returned_once(hosts: list[Host]) -> None:
    watch = watch_of(hosts)
    watch.look()
    assert watch.new_lines() == ["[h0] zero", "[h1] one", "[h2] two"]
    assert watch.shown_offsets == [5, 4, 4]
    hosts[2].log += b"shed\n"
    watch.look()
    assert watch.new_lines() == ["[h2] unfinished"]
    hosts[0].log += b"end"
    watch.look()
    assert watch.last_lines() == ["[h0] end"]


def test_nothing_is_read_where_nothing_is_new(hosts: list[Host]) -> None:
    watch = watch_of(hosts)
    for _ in range(5):
        watch.look()
        watch.new_lines()
    assert [host.asked.count("log") for host in hosts] == [1, 1, 1]


def test_a_silent_host_hides_nothing_of_the_others_and_is_not_asked_for_its_log(hosts: list[Host]) -> None:
    watch = watch_of(hosts)
    hosts[1].is_silent = True
    watch.look()
    assert watch.new_lines() == ["[h0] zero", "[h2] two"]
    assert "log" not in hosts[1].asked
    hosts[1].is_silent = False
    watch.look()
    hosts[0].is_silent = True  # only now: between the look and the reading
    hosts[0].log += b"lost meanwhile\n"
    assert watch.new_lines() == ["[h1] one"]


def test_a_flood_of_one_host_is_bounded_and_hides_no_other(hosts: list[Host]) -> None:
    hosts[0].log = b"x" * 99 + b"\n"
    hosts[0].log *= 100_000
    watch = watch_of(hosts)
    watch.look()
    lines = watch.new_lines()
    assert lines[-2:] == ["[h1] one", "[h2] two"]
    assert sum(map(len, lines)) < 512 * 1024
    assert sum("bytes of the log are left out here" in line for line in lines) == 1
    hosts[1].log += b"more\n"
    watch.look()
    assert "[h1] more" in watch.new_lines()


def test_a_backlog_at_the_end_is_returned_whole(hosts: list[Host]) -> None:
    hosts[0].log = b"".join(b"%09d\n" % number for number in range(90_000))
    watch = watch_of(hosts)
    watch.look()
    assert sum(line.startswith("[h0]") for line in watch.last_lines()) == 90_000


def test_logs_go_on_where_they_were_shown_before(hosts: list[Host]) -> None:
    watch = watch_of(hosts)
    watch.start_logs_at([5], [0, 4, 0])
    watch.look()
    assert watch.new_lines() == ["[h2] two"]
