"""The jobs of one task: placed once, started once, found again by a retry. No Airflow in here.

The order of things is what makes it safe. Where the jobs will be is written down (with the task's state, and in the
store for ``release``) before anything starts; a retry looks there first. Jobs that live or succeeded are taken over;
only after a failed or lost one does the generation rise, and every key that a job writes carries it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import JsonValue

from taas.errors import HostUnreachable
from taas_tasks.airflow.job_watch import LEASE_S, JobWatch, went_well
from taas_tasks.airflow.scope import Scope
from taas_tasks.compute import jobs as on_host
from taas_tasks.compute import program_start
from taas_tasks.compute.engine import engine
from taas_tasks.compute.inventory import Host
from taas_tasks.compute.job import JobSpec, JobState, job_id
from taas_tasks.compute.transport import Transport
from taas_tasks.compute.variables import merged
from taas_tasks.layout import HostPaths
from taas_tasks.store import ObjectStore
from taas_tasks.values import JobRecord, PlacedJob, Placement

MEMORY_KEY = "placement"
HOLD_S = 120.0
_STOP_WAIT_S = 25.0

Found = Literal["nothing", "waiting", "alive", "succeeded", "not started"]


class Memory(Protocol):
    """What outlives a try of a task: Airflow's ``task_state_store``."""

    def get(self, key: str) -> JsonValue:
        """Return the value of a key, or None."""

    def set(self, key: str, value: JsonValue) -> None:
        """Keep a value."""


@dataclass(frozen=True)
class Wanted:
    """What a task needs: ``num_hosts`` of the flavor at once, and a program on each."""

    flavor: str
    num_hosts: int
    candidates: Sequence[Host]


def owner_by_host(scope: Scope, wanted: Wanted, generation: int) -> dict[str, str]:
    """Return the id of the job that would run on each candidate. In a gang each host has its own."""
    if wanted.num_hosts == 1:
        name = job_id(scope.dag_id, scope.run_id, scope.task_id, scope.map_index, generation)
        return {host.name: name for host in wanted.candidates}
    return {
        host.name: job_id(scope.dag_id, scope.run_id, f"{scope.task_id}-{host.name}", scope.map_index, generation)
        for host in wanted.candidates
    }


def take_hosts(
    scope: Scope, wanted: Wanted, placement: Placement, transports: Mapping[str, Transport]
) -> list[PlacedJob] | on_host.Waiting:
    """Hold the hosts that a placement has, or the first free ones; else say what is waited for. Repeat it at will."""
    owners = {job.host: job.job_id for job in placement.jobs} or owner_by_host(scope, wanted, placement.generation)
    answer = on_host.take_gang(
        [host for host in wanted.candidates if host.name in owners],
        transports,
        owners,
        hold_s=HOLD_S,
        asked_at=placement.asked_at,
        num_hosts=wanted.num_hosts,
        label=f"run {scope.run_id}",
    )
    if isinstance(answer, on_host.Waiting):
        return answer
    return [PlacedJob(host=name, job_id=answer.owners[name]) for name in answer.hosts]


@dataclass
class HostJob:
    """The jobs of one try of one task."""

    scope: Scope
    wanted: Wanted
    memory: Memory
    store: ObjectStore
    transports: Mapping[str, Transport]

    def recall(self) -> Placement | None:
        """Return where this task, in this try or an earlier one, has its jobs."""
        kept = self.memory.get(MEMORY_KEY)
        return None if kept is None else Placement.model_validate(kept)

    def keep(self, placement: Placement) -> Placement:
        """Write the placement down where retries and ``release`` look."""
        self.memory.set(MEMORY_KEY, placement.model_dump(mode="json"))
        self.store.put(self.scope.keys.placement(self.scope.task_id, self.scope.map_index), placement.to_bytes())
        return placement

    def watch(self, placement: Placement) -> JobWatch:
        """Return what follows the jobs."""
        return JobWatch(transports=self.transports, jobs=placement.jobs, owner=self.scope.owner)

    def find(self) -> tuple[Found, Placement]:
        """Return what an earlier try left and the placement to go on with; jobs that live are ours from here on.

        After failed or lost jobs, nothing of them is left when this returns, and the placement is that of the next
        generation.

        Raises:
            HostUnreachable: a host that has a job does not answer, and its lease may still run.
        """
        placement = self.recall()
        if placement is None:
            return "nothing", self.keep(self._fresh(1))
        if placement.given_up:
            return "nothing", self.keep(self._fresh(placement.generation + 1))
        if not placement.jobs:
            return "waiting", placement
        states = self.watch(placement).adopt()
        silent = [job.host for job, state in zip(placement.jobs, states, strict=True) if state is None]
        if silent:
            raise HostUnreachable(f"{', '.join(silent)} has a job of this task and does not answer", hosts=silent)
        found = _found([state for state in states if state is not None])
        if found is not None:
            return found, placement
        self.clear_away(placement)
        return "nothing", self.keep(self._fresh(placement.generation + 1))

    def _fresh(self, generation: int) -> Placement:
        return Placement(
            task_id=self.scope.task_id,
            map_index=self.scope.map_index,
            generation=generation,
            flavor=self.wanted.flavor,
            asked_at=time.time(),
        )

    def place(self, placement: Placement) -> Placement | on_host.Waiting:
        """Hold hosts for the placement and write it down; nothing has started yet."""
        taken = take_hosts(self.scope, self.wanted, placement, self.transports)
        if isinstance(taken, on_host.Waiting):
            return taken
        return self.keep(placement.model_copy(update={"jobs": taken}))

    def start(self, placement: Placement, make_spec: Callable[[int, PlacedJob], JobSpec]) -> None:
        """Start every job that was not started before; ``make_spec`` is given the node's rank and the job."""
        for node_rank, job in enumerate(placement.jobs):
            on_host.submit(self.transports[job.host], make_spec(node_rank, job))

    def clear_away(self, placement: Placement) -> None:
        """End what lives of the jobs, reap what is left of lost ones, give up the slots."""

        def end(job: PlacedJob) -> None:
            on_host.stop(self.transports[job.host], job.job_id, wait_s=_STOP_WAIT_S)

        with ThreadPoolExecutor(max(1, len(placement.jobs))) as pool:
            list(pool.map(end, placement.jobs))
        self.release(placement)

    def release(self, placement: Placement) -> None:
        """Give up the hosts; one whose job lives stays taken until that has ended."""
        on_host.withdraw(self.transports, {job.host: job.job_id for job in placement.jobs})

    def record(self, placement: Placement, states: Sequence[JobState | None]) -> None:
        """Write down what each job was, for the report's seconds and prices."""
        for job, state in zip(placement.jobs, states, strict=True):
            if state is not None and state.started_at is not None:
                record = job_record(placement, job, state)
                self.store.put(self.scope.keys.job_record(job.job_id), record.to_bytes())


def _found(states: Sequence[JobState]) -> Found | None:
    """Return what to do with the jobs that there are, or None when they failed or were lost."""
    over = [state for state in states if not state.lives and state.phase != "absent"]
    if not all(went_well(state) for state in over):
        return None
    if len(over) == len(states):
        return "succeeded"
    return "not started" if any(state.phase == "absent" for state in states) else "alive"


def job_record(placement: Placement, job: PlacedJob, state: JobState) -> JobRecord:
    """Return the record of a job that is over (or of which no more is known)."""
    return JobRecord(
        job_id=job.job_id,
        task_id=placement.task_id,
        map_index=placement.map_index,
        generation=placement.generation,
        host=job.host,
        flavor=placement.flavor,
        ok=went_well(state),
        ended_by=state.ended_by,
        started_at=state.started_at,
        ended_at=state.ended_at,
    )


def program_spec(
    job: PlacedJob,
    host: Host,
    *,
    module: str,
    input_json: str,
    files: Mapping[str, str],
    env: Mapping[str, str],
    owner: str,
    timeout_s: float,
    requirements: Sequence[str] = (),
) -> JobSpec:
    """Return the job that runs one of our programs on a host; its input and ``files`` travel as 0600 files.

    A program that needs nothing made before it is started as it is; ``program_start`` starts the others.
    """
    argv, start = [host.python, "-m", module, "{job}/input.json"], {}
    if requirements or host.transport == "ssh":
        argv = [host.python, "-I", str(_program_start(host)), "{job}"]
        start = {program_start.START_FILE: _start_file(module, host, requirements)}
    return JobSpec(
        job_id=job.job_id,
        owner=owner,
        argv=argv,
        env=merged({"PYTHONUNBUFFERED": "1", **host.env}, env),
        files={**files, **start, "input.json": input_json},
        timeout_s=timeout_s,
        lease_s=LEASE_S,
        slots_owner=job.job_id,
        kill_grace_s=10,
    )


def _engine_on(host: Host) -> Path | None:
    """Return where our code lies on a host that has not installed it."""
    return HostPaths(Path(host.root)).engine(engine().digest) if host.transport == "ssh" else None


def _program_start(host: Host) -> Path:
    on_host, here = _engine_on(host), Path(program_start.__file__)
    return here if on_host is None else on_host / "taas_tasks" / "compute" / here.name


def _start_file(module: str, host: Host, requirements: Sequence[str]) -> str:
    envs = HostPaths(Path(host.root)).envs
    return program_start.start_file(module, envs=envs, requirements=requirements, engine=_engine_on(host))
