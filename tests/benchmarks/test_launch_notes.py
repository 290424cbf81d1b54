"""What ranks note, read back; and what launchers' last words say of the cause."""

from __future__ import annotations

import json

import pytest

from benchmarks.launch.launchers import names_rank
from benchmarks.launch.notes import Note, fault, read, slowest


def note(rank: int, event: str, at: float, *, host: str = "g2-0", pid: int = 7) -> Note:
    return Note(host, rank, pid + rank, event, at)


def test_a_line_that_a_killed_rank_left_unfinished_is_passed_over() -> None:
    line = json.dumps({"rank": 1, "pid": 8, "event": "step", "at": 5.0})
    assert read("g2-0", f'{line}\n{{"rank": 1, "pi') == [Note("g2-0", 1, 8, "step", 5.0)]


def test_an_event_is_reached_when_the_last_rank_first_reaches_it() -> None:
    notes = [note(0, "step", 1.0), note(0, "step", 9.0), note(1, "step", 3.0), note(1, "done", 4.0)]
    assert slowest(notes, "step", world_size=2) == 3.0


def test_an_event_that_a_rank_is_missing_from_is_not_reached() -> None:
    assert slowest([note(0, "step", 1.0)], "step", world_size=2) is None


def test_processes_of_before_a_restart_do_not_count_but_their_pids_on_other_hosts_do() -> None:
    before = [note(0, "step", 1.0), note(1, "step", 1.0)]
    again = [note(0, "step", 6.0, host="g2-1"), note(1, "step", 5.0, pid=40)]
    gone = {(one.host, one.pid) for one in before}
    assert slowest([*before, again[0]], "step", world_size=2, without=gone) is None
    assert slowest([*before, *again], "step", world_size=2, without=gone) == 6.0


def test_wrong_sums_and_ranks_too_many_are_faults() -> None:
    right = [note(0, "step", 1.0), note(1, "step", 1.0)]
    assert fault(right, world_size=2) is None
    assert "wrong sum on rank(s) [1]" in str(fault([*right, note(1, "wrong", 1.0)], world_size=2))
    assert "rank(s) [2]" in str(fault([*right, note(2, "step", 1.0)], world_size=2))


TORCHRUN = """
train.py FAILED
Failures:
  <NO_OTHER_FAILURES>
Root Cause (first observed failure):
[0]:
  time      : 2026-12-02_18:00:00
  host      : g2-0
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 77)
"""


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("rank 1 on g2-0 failed first (killed by the kernel): killed by SIGKILL\nrank 0 on g2-0: stopped", True),
        ("rank 0 on g2-0 failed first (NCCL/timeout): closed by rank 1 on g2-0", False),
        (TORCHRUN, True),
        (TORCHRUN.replace("rank      : 1 (local_rank: 1)", "rank      : 0 (local_rank: 1)"), False),
        ("Remote job failed with exit code: 1", False),
    ],
)
def test_a_message_names_the_rank_only_when_it_is_said_to_be_the_first(message: str, named: bool) -> None:
    assert names_rank(message, 1, "g2-0") is named
