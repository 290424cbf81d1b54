"""Ending what a run still has on hosts, at its end. No Airflow in here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from taas.errors import LaunchError
from taas_tasks.airflow.deployment import Deployment
from taas_tasks.airflow.host_job import job_record
from taas_tasks.airflow.hosts import OpenHosts
from taas_tasks.airflow.scope import Scope
from taas_tasks.compute import jobs as on_host
from taas_tasks.compute.job import JobState
from taas_tasks.compute.transport import Transport
from taas_tasks.layout import RunKeys
from taas_tasks.store import ObjectStore
from taas_tasks.values import PlacedJob, Placement

_WAIT_S = 25.0
_AT_WORK = ("scheduled", "queued", "running", "deferred", "up_for_retry", "up_for_reschedule", "restarting")


def placements(store: ObjectStore, keys: RunKeys) -> list[Placement]:
    """Return where the tasks of a run have, or had, their jobs."""
    return [Placement.model_validate_json(store.get(info.key)) for info in store.list(keys.placements)]


def _state_name(placement: Placement) -> str:
    return placement.task_id if placement.map_index < 0 else f"{placement.task_id}_{placement.map_index}"


def release_run(
    scope: Scope, deployment: Deployment, store: ObjectStore, states: Mapping[str, str | None]
) -> Iterator[str]:
    """End every job of the run that lives, reap lost ones, give the slots back; yield what was done, for people.

    Runs right after a user ended a task, before the trigger is told: so it ends the jobs itself. A task that is at work
    (again) is left alone.
    """
    over = [one for one in placements(store, scope.keys) if states.get(_state_name(one)) not in _AT_WORK]
    pairs = [(placement, job) for placement in over for job in placement.jobs]
    known = OpenHosts().of(deployment.inventory.hosts)
    reachable = [(placement, job, known[job.host]) for placement, job in pairs if job.host in known]
    for placement, job, state in _end_all(reachable):
        if isinstance(state, LaunchError):
            yield f"{state.message}: job {job.job_id} on {job.host} ends by itself when its lease runs out"
            continue
        key = scope.keys.job_record(job.job_id)
        if state.started_at is not None and store.head(key) is None:
            store.put(key, job_record(placement, job, state).to_bytes())
            yield f"{job.job_id} on {job.host} was ended ({state.phase})"
    if any(states.get(name) in ("failed", "upstream_failed") for name in ("gate", "train")):
        store.put_if_absent(scope.keys.abort, b"the run was released")


def _end_all(
    jobs: Sequence[tuple[Placement, PlacedJob, Transport]],
) -> list[tuple[Placement, PlacedJob, JobState | LaunchError]]:
    def end(item: tuple[Placement, PlacedJob, Transport]) -> tuple[Placement, PlacedJob, JobState | LaunchError]:
        placement, job, transport = item
        try:
            state = on_host.stop(transport, job.job_id, wait_s=_WAIT_S)
            on_host.withdraw({job.host: transport}, {job.host: job.job_id})
        except LaunchError as error:
            return placement, job, error
        return placement, job, state

    with ThreadPoolExecutor(max(1, min(16, len(jobs)))) as pool:
        return list(pool.map(end, jobs))
