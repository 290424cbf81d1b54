"""Triggers: what is stored of them, and what they do with real jobs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from pathlib import Path

import pytest

from taas_tasks.airflow import triggers
from taas_tasks.airflow.deployment import ConnectionKeys, as_on_hosts, key_files
from taas_tasks.airflow.scope import Scope, offsets_of
from taas_tasks.airflow.triggers import GateTrigger, HostJobTrigger, HostsTrigger
from taas_tasks.compute import jobs
from taas_tasks.layout import HostPaths
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import StoreConfig
from tests.airflow.hosts import GOOD, host_job, inventory, pids, shell, stop_everything

BASE = {
    "dag_id": "taas_train",
    "run_id": "manual__2026-01-01T00:00:00+00:00; $(x)",
    "task_id": "train",
    "map_index": -1,
    "owner": "0197-uuid",
    "stopped_by": ["prepare"],
    "stopped_by_states": ["failed"],
}
PLACEMENT = {"task_id": "train", "generation": 3, "flavor": "g2.8", "asked_at": 1.5}
CASES = [
    (HostJobTrigger, {**BASE, "jobs": [{"host": "g2-0", "job_id": "a"}], "deadline": 5.0, "log_offsets": [7]}),
    (HostsTrigger, {**BASE, "num_hosts": 2, "placement": PLACEMENT}),
    (GateTrigger, {**BASE, "deadline": 9.0}),
]


@pytest.mark.parametrize(("kind", "kwargs"), CASES)
def test_kwargs_survive_storage(kind, kwargs):
    from airflow.serialization.serialized_objects import BaseSerialization

    path, stored = kind(**kwargs).serialize()
    assert path == f"taas_tasks.airflow.triggers.{kind.__name__}"
    again = BaseSerialization.deserialize(json.loads(json.dumps(BaseSerialization.serialize(stored))))
    assert kind(**again).serialize() == (path, stored)


@pytest.mark.parametrize(("kind", "kwargs"), CASES)
def test_kwargs_hold_ids_only(kind, kwargs):
    text = json.dumps(kind(**kwargs).serialize()[1])
    for word in ("secret", "password", "access_key", "env", "argv"):
        assert word not in text


class Airflow:
    """What triggers ask Airflow for, answered by a test: the seam is their methods of the same names."""

    def __init__(self, hosts, *, state: str = "deferred") -> None:
        self.hosts = hosts
        self.state = state
        self.num_stopped = 0
        self.offsets: list[int] = []
        self.store = StoreConfig(bucket="b", access_key="a", secret_key="k")

    def trigger(self, kind, **kwargs):
        airflow = self

        class Told(kind):
            def inventory(self):
                return airflow.hosts

            def store_config(self):
                return airflow.store

            def num_stopped(self):
                return airflow.num_stopped

            def my_state(self):
                return airflow.state

            def read_offsets(self):
                return airflow.offsets

            def write_offsets(self, offsets):
                airflow.offsets = offsets

        return Told(**kwargs)


@pytest.fixture
def hosts(tmp_path):
    found = inventory(tmp_path)
    yield found
    stop_everything(found)


def scope_kwargs(**changes):
    return dataclasses.asdict(dataclasses.replace(Scope("taas_train", "run-1", "prepare", 0, "try-1"), **changes))


def started(hosts, *scripts, num_hosts=1, flavor="c1.4"):
    job = host_job(hosts, MemoryStore(), num_hosts=num_hosts, flavor=flavor)
    placement = job.place(job.find()[1])
    job.start(placement, shell(*scripts))
    return job, placement


async def first_event(trigger, *, wait_s=30):
    async def get():
        async for event in trigger.run():
            return event.payload
        raise AssertionError("no event")

    return await asyncio.wait_for(get(), wait_s)


def follow(airflow, placement, **kwargs):
    jobs = [job.model_dump() for job in placement.jobs]
    return airflow.trigger(HostJobTrigger, **scope_kwargs(), jobs=jobs, **{"deadline": time.time() + 60, **kwargs})


def shown(capsys) -> list[str]:
    return re.findall(r"\[info +\] (\w+) ", capsys.readouterr().out)


def test_event_when_the_job_is_over_and_its_log_was_shown(hosts, capsys):
    airflow = Airflow(hosts)
    _, placement = started(hosts, f"echo one; sleep 1; echo two; printf three; {GOOD}")
    event = asyncio.run(first_event(follow(airflow, placement)))
    assert event["status"] == "ended"
    assert shown(capsys) == ["one", "two", "three"]
    assert airflow.offsets == [len(b"one\ntwo\nthree")]


def test_jobs_are_given_session_credentials_anew_and_those_of_other_jobs_nothing(hosts):
    airflow = Airflow(hosts)
    old, airflow.store = (
        StoreConfig(bucket="b", access_key=name, secret_key="k", session_token="t") for name in ("old", "new")
    )
    wait = f"until grep -q new store-keys.json; do sleep 0.1; done; stat -c %a store-keys.json; {GOOD}"
    job = host_job(hosts, MemoryStore(), num_hosts=2)
    placement = job.place(job.find()[1])
    plain = shell(f"sleep 1; test ! -e store-keys.json; {GOOD}")

    def spec(node_rank, placed):
        files = key_files(old) if node_rank == 0 else {}
        return (shell(wait) if node_rank == 0 else plain)(0, placed).model_copy(update={"files": files})

    job.start(placement, spec)
    event = asyncio.run(first_event(follow(airflow, placement)))
    assert event["status"] == "ended"
    assert all(jobs.failure(state, host="") is None for state in job.watch(placement).look().states)
    folder = HostPaths(Path(hosts.host(placement.jobs[0].host).root)).job(placement.jobs[0].job_id)
    assert (folder / "log").read_text() == "600\n"
    assert not (folder / "store-keys.json").exists()


def test_a_store_with_session_credentials_is_told_to_jobs_by_a_file():
    store = StoreConfig(bucket="b", access_key="a", secret_key="k", session_token="t")
    told = as_on_hosts(store)
    assert told.credentials_path == "store-keys.json"
    assert not {"a", "k", "t"} & {told.access_key, told.secret_key, told.session_token}
    assert json.loads(key_files(store)["store-keys.json"]) == {
        "access_key": "a", "secret_key": "k", "session_token": "t",
    }  # fmt: skip
    lasting = StoreConfig(bucket="b", access_key="a", secret_key="k")
    assert as_on_hosts(lasting) is lasting and key_files(lasting) == {}


def test_keys_of_the_connection_are_read_again_when_they_expired():
    store = StoreConfig(bucket="b", access_key="a", secret_key="k", session_token="t")
    now = [store]
    source = ConnectionKeys(store, read=lambda: now[0])
    first = source.keys()
    assert not source.await_others(first)
    now[0] = store.model_copy(update={"session_token": "u"})
    assert source.await_others(first) and source.keys().session_token == "u"


@pytest.mark.parametrize("kept_by", ["this one", "an older one", "the task"])
def test_restarted_triggerer_does_not_show_the_log_again(hosts, capsys, kept_by):
    airflow = Airflow(hosts)
    _, placement = started(hosts, f"echo one; echo two; {GOOD}")
    shown_before = len(b"one\n")
    airflow.offsets = {"this one": [shown_before], "an older one": offsets_of(shown_before), "the task": []}[kept_by]
    told = {"log_offsets": [shown_before]} if kept_by == "the task" else {}
    asyncio.run(first_event(follow(airflow, placement, **told)))
    assert shown(capsys) == ["two"]


def test_a_trigger_that_was_stored_before_all_logs_were_shown_goes_on():
    base = {**BASE, "jobs": [{"host": "g2-0", "job_id": "a"}, {"host": "g2-1", "job_id": "b"}], "deadline": 5.0}
    trigger = HostJobTrigger(**base, log_offset=7)
    assert trigger.serialize()[1]["log_offsets"] == [7]
    assert (offsets_of(None), offsets_of(7), offsets_of([7, 8])) == ([0], [7], [7, 8])


def test_logs_of_all_hosts_are_shown_each_line_with_its_host(hosts, capsys):
    airflow = Airflow(hosts)
    scripts = [f"echo '[g2-0 r0] a'; printf 'agent says'; {GOOD}", f"echo '[g2-1 r8] b'; echo '[c1 r1] x'; {GOOD}"]
    _, placement = started(hosts, *scripts, num_hosts=2, flavor="g2.8")
    asyncio.run(first_event(follow(airflow, placement)))
    out = capsys.readouterr().out
    expected = ["[g2-0 r0] a", "[g2-0] agent says", "[g2-1 r8] b", "[g2-1] [c1 r1] x"]
    assert all(f" {line} " in out for line in expected)
    assert airflow.offsets == [len("[g2-0 r0] a\nagent says"), len("[g2-1 r8] b\n[c1 r1] x\n")]


def test_failure_of_another_task_ends_the_jobs(hosts):
    airflow = Airflow(hosts)
    airflow.num_stopped = 1
    _, placement = started(hosts, "sleep 60")
    trigger = follow(airflow, placement, stopped_by=["train"], stopped_by_states=["failed"])
    event = asyncio.run(first_event(trigger))
    assert event["status"] == "stopped" and "train" in event["reason"]
    assert pids(hosts, placement.jobs[0]) == []


def test_deadline_ends_the_jobs(hosts):
    _, placement = started(hosts, "sleep 60")
    event = asyncio.run(first_event(follow(Airflow(hosts), placement, deadline=time.time() - 1)))
    assert event["status"] == "timeout"
    assert pids(hosts, placement.jobs[0]) == []


def test_peer_of_a_failed_job_is_ended(hosts):
    _, placement = started(hosts, "exit 3", "sleep 60", num_hosts=2, flavor="g2.8")
    began = time.monotonic()
    event = asyncio.run(first_event(follow(Airflow(hosts), placement)))
    assert event["status"] == "ended" and time.monotonic() - began < 50  # not 60 s
    assert pids(hosts, placement.jobs[1]) == []


async def kill(trigger):
    await trigger.on_kill()
    await asyncio.gather(*triggers._kills)


@pytest.mark.parametrize("state", ["failed", "success", "skipped"])
def test_on_kill_ends_the_jobs_of_a_task_that_a_user_ended(hosts, state):
    _, placement = started(hosts, "sleep 60")
    asyncio.run(kill(follow(Airflow(hosts, state=state), placement)))
    give_up = time.monotonic() + 50
    while pids(hosts, placement.jobs[0]) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert pids(hosts, placement.jobs[0]) == []


@pytest.mark.parametrize("state", ["deferred", "running", "scheduled", None])
def test_on_kill_of_a_stalled_triggerer_ends_nothing(hosts, state):
    _, placement = started(hosts, "sleep 60")
    asyncio.run(kill(follow(Airflow(hosts, state=state), placement)))
    time.sleep(0.5)
    assert pids(hosts, placement.jobs[0])


def test_on_kill_leaves_a_job_that_the_next_try_owns(hosts):
    job, placement = started(hosts, "sleep 60")
    dataclasses.replace(job, scope=dataclasses.replace(job.scope, owner="try-2")).watch(placement).adopt()
    asyncio.run(kill(follow(Airflow(hosts, state="failed"), placement)))
    time.sleep(0.5)
    assert pids(hosts, placement.jobs[0])


def test_hosts_are_held_as_soon_as_they_are_free(hosts):
    holder, held = started(hosts, "sleep 60", num_hosts=2)
    waiting = host_job(hosts, MemoryStore(), scope=Scope("taas_train", "run-2", "prepare", 0, "try-1"))
    placement = waiting.find()[1]
    trigger = Airflow(hosts).trigger(
        HostsTrigger, **dataclasses.asdict(waiting.scope), num_hosts=1, placement=placement.model_dump(mode="json")
    )

    async def scenario():
        event = asyncio.create_task(first_event(trigger))
        await asyncio.sleep(1.5)
        assert not event.done()
        await asyncio.to_thread(holder.clear_away, held)
        return await event

    assert asyncio.run(scenario())["status"] == "held"
    assert waiting.place(placement).jobs[0].host in {host.name for host in hosts.of_flavor("c1.4")}
