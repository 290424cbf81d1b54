"""Jobs of a task: placed once, started once, found again."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import pytest

from taas.errors import HostUnreachable
from taas_tasks.airflow.host_job import HostJob, owner_by_host
from taas_tasks.airflow.job_watch import Look, next_step, went_well
from taas_tasks.compute.job import JobState
from taas_tasks.compute.jobs import Waiting
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import JobRecord, Placement
from tests.airflow.hosts import BAD, GOOD, SCOPE, MemoryDict, host_job, inventory, pids, shell, stop_everything


@pytest.fixture
def hosts(tmp_path):
    found = inventory(tmp_path)
    yield found
    stop_everything(found)


@pytest.fixture
def store():
    return MemoryStore()


def until_over(job: HostJob, placement: Placement, *, wait_s: float = 20) -> Look:
    watch = job.watch(placement)
    give_up = time.monotonic() + wait_s
    while time.monotonic() < give_up:
        look = watch.look()
        step = next_step(look, now=0, deadline=1)
        if step == "cancel":
            watch.cancel()
        elif step != "wait":
            return look
        time.sleep(0.05)
    raise AssertionError(f"not over in time: {look}")


def placed(job: HostJob, placement: Placement) -> Placement:
    found = job.place(placement)
    assert isinstance(found, Placement), found
    return found


def next_try(job: HostJob, owner: str = "try-2") -> HostJob:
    return dataclasses.replace(job, scope=dataclasses.replace(job.scope, owner=owner))


def test_first_try_finds_nothing_and_writes_its_place_down_before_the_start(hosts, store):
    job = host_job(hosts, store)
    found, placement = job.find()
    placement = placed(job, placement)
    assert found == "nothing"
    assert Placement.model_validate(job.memory.get("placement")) == placement
    assert Placement.model_validate_json(store.get(SCOPE.keys.placement("prepare", 0))) == placement
    assert pids(hosts, placement.jobs[0]) == []


def test_retry_after_a_death_before_the_start_starts_the_same_job(hosts, store):
    job = host_job(hosts, store)
    first = placed(job, job.find()[1])
    found, placement = next_try(job).find()
    assert (found, placement) == ("not started", first)
    again = placed(next_try(job), placement)
    assert again.jobs == first.jobs


def test_retry_attaches_to_a_job_that_lives_and_owns_it(hosts, store):
    job = host_job(hosts, store)
    first = placed(job, job.find()[1])
    job.start(first, shell("sleep 60"))
    before = pids(hosts, first.jobs[0])
    second = next_try(job)
    assert second.find() == ("alive", first)
    assert pids(hosts, first.jobs[0]) == before
    job.watch(first).cancel()  # the first try no longer owns it
    time.sleep(0.5)
    assert pids(hosts, first.jobs[0]) == before
    second.watch(first).cancel()
    until_over(second, first)
    assert pids(hosts, first.jobs[0]) == []


def test_retry_takes_the_result_of_a_job_that_succeeded(hosts, store):
    job = host_job(hosts, store)
    first = placed(job, job.find()[1])
    job.start(first, shell(GOOD))
    until_over(job, first)
    assert next_try(job).find() == ("succeeded", first)


@pytest.mark.parametrize("script", [BAD, "exit 3", "kill -9 $$"])
def test_retry_after_a_failed_job_is_a_new_generation(hosts, store, script):
    job = host_job(hosts, store)
    first = placed(job, job.find()[1])
    job.start(first, shell(script))
    until_over(job, first)
    found, placement = next_try(job).find()
    assert (found, placement.generation, placement.jobs) == ("nothing", 2, [])
    second = placed(next_try(job), placement)
    assert second.jobs[0].job_id != first.jobs[0].job_id


def test_retry_after_a_lost_supervisor_reaps_and_raises_the_generation(hosts, store):
    job = host_job(hosts, store)
    first = placed(job, job.find()[1])
    job.start(first, shell("sleep 60 & sleep 60"))
    state = job.watch(first).look().states[0]
    assert state is not None and state.lives
    supervisor = int((job_folder(hosts, first) / "state.json").read_text().split('"supervisor": [')[1].split(",")[0])
    os.kill(supervisor, signal.SIGKILL)
    give_up = time.monotonic() + 10
    while job.watch(first).look().any_lives and time.monotonic() < give_up:
        time.sleep(0.05)
    found, placement = next_try(job).find()
    assert (found, placement.generation) == ("nothing", 2)
    assert pids(hosts, first.jobs[0]) == []


def job_folder(hosts, placement):
    from pathlib import Path

    job = placement.jobs[0]
    return Path(hosts.host(job.host).root) / "jobs" / job.job_id


def test_gang_waits_whole_and_says_for_whom(hosts, store):
    taker = host_job(hosts, store, flavor="g2.8", scope=dataclasses.replace(SCOPE, run_id="other"))
    first = placed(taker, taker.find()[1])
    taker.start(first, shell("sleep 60"))
    gang = host_job(hosts, store, flavor="g2.8", num_hosts=2, scope=dataclasses.replace(SCOPE, task_id="train"))
    waiting = gang.place(gang.find()[1])
    assert isinstance(waiting, Waiting)
    assert waiting.reason == "waits for 1 of 2 g2.8; held by run other"
    assert gang.find()[0] == "waiting"
    taker.clear_away(first)
    assert len(placed(gang, gang.find()[1]).jobs) == 2


def test_each_host_of_a_gang_has_a_job_of_its_own_name(hosts, store):
    gang = host_job(hosts, store, flavor="g2.8", num_hosts=2)
    names = owner_by_host(gang.scope, gang.wanted, 1)
    assert len(set(names.values())) == 2


def test_one_failed_node_ends_the_others(hosts, store):
    gang = host_job(hosts, store, flavor="g2.8", num_hosts=2)
    placement = placed(gang, gang.find()[1])
    started = time.monotonic()
    gang.start(placement, shell("exit 3", "sleep 60"))
    look = until_over(gang, placement)
    assert time.monotonic() - started < 50  # not the 60 s of the other
    states = [state for state in look.states if state is not None]
    assert [state.ended_by for state in states] == ["exit", "cancel"]
    assert [pids(hosts, job) for job in placement.jobs] == [[], []]


def test_half_started_gang_is_completed_by_the_retry(hosts, store):
    gang = host_job(hosts, store, flavor="g2.8", num_hosts=2)
    placement = placed(gang, gang.find()[1])
    gang.start(placement.model_copy(update={"jobs": placement.jobs[:1]}), shell("sleep 60"))
    first_pids = pids(hosts, placement.jobs[0])
    again = next_try(gang)
    found, same = again.find()
    assert (found, same) == ("not started", placement)
    again.start(placed(again, same), shell("sleep 60", owner="try-2"))
    assert pids(hosts, placement.jobs[0]) == first_pids
    assert pids(hosts, placement.jobs[1])


def test_silent_host_is_not_given_up_by_a_retry(hosts, store, tmp_path):
    job = host_job(hosts, store)
    first = placed(job, job.find()[1])
    silent = dataclasses.replace(next_try(job), transports=dict.fromkeys(job.transports, Silent()))
    with pytest.raises(HostUnreachable, match=first.jobs[0].host):
        silent.find()
    silent.keep(first.model_copy(update={"given_up": True}))
    assert silent.find()[1].generation == 2


class Silent:
    def call(self, verb, payload):
        raise HostUnreachable("no answer")


def test_records_and_slots_after_the_end(hosts, store):
    job = host_job(hosts, store)
    placement = placed(job, job.find()[1])
    job.start(placement, shell(GOOD))
    look = until_over(job, placement)
    job.record(placement, look.states)
    job.release(placement)
    record = JobRecord.model_validate_json(store.get(SCOPE.keys.job_record(placement.jobs[0].job_id)))
    assert record.ok and record.flavor == "c1.4" and record.ended_at >= record.started_at
    host = placement.jobs[0].host
    assert job.transports[host].call("slots", {})["slots"] == []


def test_log_is_read_in_whole_lines_and_a_flood_is_cut(hosts, store):
    job = host_job(hosts, store)
    placement = placed(job, job.find()[1])
    job.start(placement, shell(f"printf 'a\\nb'; sleep 0.5; printf 'c\\n'; {GOOD}"))
    watch = job.watch(placement)
    lines: list[str] = []
    while not went_well(watch.look().states[0] or pytest.fail("no answer")):
        lines += watch.new_lines()
        time.sleep(0.05)
    lines += watch.last_lines()
    assert lines == ["a", "bc"]
    again = job.watch(placement)
    again.look()
    assert again.new_lines() == ["a", "bc"]
    assert again.shown_offsets == [len(b"a\nbc\n")]


def test_flood_is_cut_in_the_middle(hosts, store):
    job = host_job(hosts, store)
    placement = placed(job, job.find()[1])
    job.start(placement, shell(f"head -c 3000000 /dev/zero | tr '\\0' 'x' | fold -w 99; echo; echo last; {GOOD}"))
    until_over(job, placement)
    watch = job.watch(placement)
    watch.look()
    lines = watch.last_lines()
    assert lines[-1] == "last"
    assert any("left out here" in line for line in lines)
    assert sum(map(len, lines)) < 1_000_000


def state(**fields) -> JobState:
    return JobState(job_id="j", **{"phase": "running", **fields})


OVER = {"phase": "ended", "ended_by": "exit", "exit_code": 0}


@pytest.mark.parametrize(
    ("look", "step"),
    [
        (Look([state()]), "wait"),
        (Look([state(**OVER)]), "ended"),
        (Look([state(), state(**OVER)]), "wait"),
        (Look([state(), state(phase="lost")], failed_s=1), "wait"),
        (Look([state(), state(phase="lost")], failed_s=5), "cancel"),
        (Look([None, state(phase="lost")], unreachable_s=10, failed_s=5), "cancel"),
        (Look([None, state(phase="lost")], unreachable_s=40, failed_s=5), "ended"),
        (Look([None], unreachable_s=100), "wait"),
        (Look([None], unreachable_s=1000), "unreachable"),
    ],
)
def test_next_step(look, step):
    assert next_step(look, now=0, deadline=10) == step


def test_next_step_after_the_deadline_is_to_stop():
    assert next_step(Look([state()]), now=11, deadline=10) == "timeout"


@pytest.mark.parametrize(
    ("fields", "well"),
    [
        (OVER, True),
        ({**OVER, "outcome": {"ok": True, "result": {}}}, True),
        ({**OVER, "outcome": {"ok": False, "error": {"type": "LoaderError", "message": "x"}}}, False),
        ({**OVER, "exit_code": 1}, False),
        ({}, False),
    ],
)
def test_a_job_went_well_only_when_its_program_says_so(fields, well):
    assert went_well(state(**fields)) is well


def test_memory_of_a_task_is_what_a_retry_reads(hosts, store):
    memory = MemoryDict()
    job = host_job(hosts, store, memory=memory)
    placement = placed(job, job.find()[1])
    assert host_job(hosts, store, memory=memory).recall() == placement
