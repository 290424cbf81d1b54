"""What every transport must do: the same tests over each of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from taas.errors import LaunchError
from taas_tasks.compute import jobs
from tests.compute.hosts import EmulatedHost, until

FOREVER = "sleep 1000"


# ---- launch once, attach ----


def test_sixteen_racing_starts_launch_once_and_all_see_the_job(any_host: EmulatedHost):
    together = threading.Barrier(16)

    def start(_: int):
        together.wait()
        return any_host.sh(f"echo x >> launches; {FOREVER}")

    with ThreadPoolExecutor(16) as pool:
        states = list(pool.map(start, range(16)))
    assert {state.phase for state in states} == {"running"}
    assert len({state.pid for state in states}) == 1
    assert any_host.text("launches") == "x\n"


def test_a_start_of_a_job_that_ended_only_reports_it(any_host: EmulatedHost):
    any_host.sh("echo x >> launches; exit 3")
    any_host.ended()
    state = any_host.sh("echo x >> launches; exit 4", owner="try-2")
    assert (state.phase, state.exit_code) == ("ended", 3)
    assert any_host.text("launches") == "x\n"


def test_an_unknown_job_is_absent(any_host: EmulatedHost):
    state = any_host.state("nothing")
    assert (state.phase, state.owner, state.log_bytes) == ("absent", None, 0)
    assert jobs.log(any_host.transport, "nothing").text == ""
    assert jobs.renew(any_host.transport, "nothing", lease_s=5).phase == "absent"


def test_a_live_job_tells_owner_and_lease(any_host: EmulatedHost):
    any_host.sh(FOREVER, lease_s=50)
    state = any_host.state()
    assert state.owner == "try-1"
    assert state.lease_left_s is not None and 40 < state.lease_left_s <= 50
    any_host.sh(FOREVER, job_id="unleased", lease_s=None)
    assert any_host.state("unleased").lease_left_s is None


# ---- owners ----


def test_only_the_owner_may_cancel(any_host: EmulatedHost):
    any_host.sh(FOREVER, kill_grace_s=1)
    assert jobs.cancel(any_host.transport, "job", owner="someone").lives
    assert not (any_host.folder() / "cancel.json").exists()
    jobs.cancel(any_host.transport, "job", owner="try-1")
    state = any_host.ended()
    assert (state.ended_by, state.cancelled_by) == ("cancel", "try-1")


def test_a_new_try_adopts_the_job_and_the_old_one_can_neither_cancel_nor_renew(any_host: EmulatedHost):
    any_host.sh(FOREVER, lease_s=50)
    assert any_host.sh(FOREVER, owner="try-2", lease_s=100).owner == "try-2"
    jobs.cancel(any_host.transport, "job", owner="try-1")
    state = jobs.renew(any_host.transport, "job", lease_s=1000, owner="try-1")
    assert state.lives and state.owner == "try-2"
    assert state.lease_left_s is not None and state.lease_left_s <= 100
    assert not (any_host.folder() / "cancel.json").exists()


def test_a_renewal_can_adopt(any_host: EmulatedHost):
    any_host.sh(FOREVER)
    assert jobs.renew(any_host.transport, "job", lease_s=60, owner="try-2", adopt=True).owner == "try-2"
    state = jobs.renew(any_host.transport, "job", lease_s=70, owner="try-2")
    assert state.lease_left_s is not None and 60 < state.lease_left_s <= 70


def test_a_release_cancels_whoever_owns_the_job(any_host: EmulatedHost):
    any_host.sh(FOREVER, kill_grace_s=1)
    state = jobs.stop(any_host.transport, "job", wait_s=10)
    assert (state.phase, state.ended_by, state.cancelled_by) == ("ended", "cancel", None)
    assert any_host.pids() == []


def test_a_job_released_before_its_start_never_starts(any_host: EmulatedHost):
    assert jobs.stop(any_host.transport, "job", wait_s=1).phase == "tombstone"
    state = any_host.sh("echo x > launches")
    assert state.phase == "tombstone"
    assert state.error == "cancelled before it was started"
    assert not (any_host.folder() / "launches").exists()


def test_a_cancel_by_an_owner_of_a_job_never_started_changes_nothing(any_host: EmulatedHost):
    jobs.cancel(any_host.transport, "job", owner="try-1")
    assert any_host.sh("exit 3", owner="try-2").phase in ("running", "ended")


def test_a_tombstone_stops_a_later_start_and_leaves_a_live_job_alone(any_host: EmulatedHost):
    assert any_host.transport.call("tombstone", {"job_id": "job", "reason": "too late"})["phase"] == "tombstone"
    assert any_host.sh("true").error == "too late"
    any_host.sh(FOREVER, job_id="live")
    assert any_host.transport.call("tombstone", {"job_id": "live"})["phase"] == "running"


# ---- what it leaves ----


def test_the_outcome_comes_with_the_state(any_host: EmulatedHost):
    any_host.sh("""echo '{"ok": true, "result": {"n": "ö"}}' > outcome.json""")
    assert any_host.ended().outcome == {"ok": True, "result": {"n": "ö"}}


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("echo '[1]' > outcome.json", "no JSON object"),
        ("echo '{' > outcome.json", "no JSON"),
        ("head -c 300000 /dev/zero > outcome.json", "larger than 262144 bytes"),
        ("mkfifo outcome.json", "no file"),
        ("mkdir outcome.json", "no file"),
    ],
)
def test_an_outcome_that_is_none_is_said(any_host: EmulatedHost, script: str, fault: str):
    any_host.sh(script)
    state = any_host.ended()
    assert state.outcome is None
    assert state.error is not None and fault in state.error


def test_a_log_is_read_by_offset(any_host: EmulatedHost):
    any_host.sh("echo one; echo two >&2; while [ ! -e go ]; do sleep 0.02; done; echo three")
    until(lambda: any_host.state().log_bytes == 8)
    first = jobs.log(any_host.transport, "job")
    assert (first.text, first.next_offset, first.size) == ("one\ntwo\n", 8, 8)
    assert jobs.log(any_host.transport, "job", offset=8).text == ""
    (any_host.folder() / "go").touch()
    any_host.ended()
    assert jobs.log(any_host.transport, "job", offset=first.next_offset).text == "three\n"
    assert jobs.log(any_host.transport, "job", offset=1000).next_offset == 14


@pytest.mark.parametrize("limit", [4, 7])
def test_a_log_read_in_pieces_never_cuts_a_character(any_host: EmulatedHost, limit: int):
    text = "aё世🚂🚂b\n"
    any_host.submit(["printf", "%s", text])
    any_host.ended()
    pieces, offset = [], 0
    while True:
        chunk = jobs.log(any_host.transport, "job", offset=offset, limit=limit)
        if not chunk.text:
            break
        pieces.append(chunk.text)
        assert chunk.next_offset > offset
        offset = chunk.next_offset
    assert "".join(pieces) == text


def test_half_a_character_waits_for_the_other_half_while_the_job_lives(any_host: EmulatedHost):
    any_host.sh(r"printf 'a\360\237'; while [ ! -e go ]; do sleep 0.02; done; printf '\232\202b\377\360'")
    until(lambda: any_host.state().log_bytes == 3)
    first = jobs.log(any_host.transport, "job")
    assert (first.text, first.next_offset, first.size) == ("a", 1, 3)
    (any_host.folder() / "go").touch()
    any_host.ended()
    last = jobs.log(any_host.transport, "job", offset=1)
    assert (last.text, last.next_offset) == ("🚂b\ufffd\ufffd", 8)


def test_other_logs_of_the_job_can_be_read_and_nothing_else(any_host: EmulatedHost):
    any_host.sh("mkdir logs; echo deep > logs/rank-0.log; ln -s ../../../secret s.log", files={"in.json": "secret"})
    any_host.ended()
    assert jobs.log(any_host.transport, "job", name="logs/rank-0.log").text == "deep\n"
    (any_host.root.parent / "secret").write_text("secret")
    for name in ("in.json", "../other/log", "/etc/passwd", "s.log", "spec.json", "a\0.log"):
        with pytest.raises(LaunchError):
            jobs.log(any_host.transport, "job", name=name)


def test_a_job_that_is_forgotten_leaves_only_its_tombstone(any_host: EmulatedHost):
    any_host.sh("mkdir d; touch d/x; ln -s /etc link; echo secret")
    any_host.ended()
    assert jobs.forget(any_host.transport, "job").phase == "tombstone"
    assert {path.name for path in any_host.folder().iterdir()} == {"tombstone.json", "lock", "control"}
    assert any_host.sh("true").phase == "tombstone"


def test_a_live_job_is_not_forgotten(any_host: EmulatedHost):
    any_host.sh(FOREVER)
    with pytest.raises(LaunchError, match="cancel or reap"):
        jobs.forget(any_host.transport, "job")
    assert any_host.state().lives


# ---- what is refused ----


@pytest.mark.parametrize("job_id", ["..", "a/b", None])
def test_an_id_that_is_no_name_of_a_folder_is_refused(any_host: EmulatedHost, job_id: object):
    with pytest.raises(LaunchError, match="no name of a folder"):
        any_host.transport.call("state", {"job_id": job_id})


def test_an_unknown_verb_is_refused(any_host: EmulatedHost):
    with pytest.raises(LaunchError, match="unknown verb 'explode'; known: start, state"):
        any_host.transport.call("explode", {})


# ---- slots ----


def take(host: EmulatedHost, owner: str, *, num_slots: int = 1, hold_s: float = 60, **more: float) -> dict[str, object]:
    return host.transport.call("slot_take", {"num_slots": num_slots, "owner": owner, "hold_s": hold_s, **more})


def test_of_racing_takers_as_many_as_there_are_slots_get_one(any_host: EmulatedHost):
    together = threading.Barrier(8)

    def race(number: int):
        together.wait()
        return take(any_host, f"job-{number}", num_slots=3)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(race, range(8)))
    assert sorted(answer["slot"] for answer in answers if answer["taken"]) == [0, 1, 2]
    shown = any_host.transport.call("slots", {})
    assert len(shown["slots"]) == 3 and len(shown["tickets"]) == 5


def test_taking_again_keeps_the_slot(any_host: EmulatedHost):
    assert take(any_host, "a") == {"taken": True, "slot": 0}
    assert take(any_host, "a") == {"taken": True, "slot": 0}
    assert take(any_host, "b") == {"taken": False, "held_by": ["a"], "ahead": []}


def test_a_slot_whose_job_lives_stays_taken_when_the_hold_has_run_out(any_host: EmulatedHost):
    take(any_host, "job", hold_s=0)
    any_host.sh(FOREVER, kill_grace_s=1)
    assert not take(any_host, "b")["taken"]
    any_host.transport.call("slot_release", {"owner": "job"})
    assert not take(any_host, "b")["taken"]
    jobs.stop(any_host.transport, "job", wait_s=10)
    assert take(any_host, "b")["taken"]


def test_a_hold_keeps_the_slot_when_the_job_has_ended(any_host: EmulatedHost):
    take(any_host, "job", hold_s=60)
    any_host.sh("true")
    any_host.ended()
    assert not take(any_host, "b")["taken"]
    assert any_host.transport.call("slot_release", {"owner": "job"}) == {"released": True}
    assert take(any_host, "b")["taken"]


def test_a_job_without_the_slot_it_needs_is_not_launched(any_host: EmulatedHost):
    with pytest.raises(LaunchError, match="holds no slot"):
        any_host.sh("true", slots_owner="job")
    assert any_host.state().phase == "absent"
    take(any_host, "job", hold_s=0.1)
    assert any_host.sh("true", slots_owner="job").phase in ("running", "ended")
