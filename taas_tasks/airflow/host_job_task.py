"""Base of the tasks that run jobs on hosts: take hosts, start once, follow, finish, across deferrals and retries."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from airflow.sdk.exceptions import TaskDeferred
from pydantic import BaseModel

from taas.errors import HostRefused, HostUnreachable, JobFailed, JobLost, JobTimeout, RunCancelled, TaasError
from taas_tasks.airflow.deployment import Deployment, key_files, read_deployment
from taas_tasks.airflow.host_job import HostJob, Wanted, program_spec
from taas_tasks.airflow.hosts import OpenHosts
from taas_tasks.airflow.job_watch import JobWatch, Look, next_step, went_well
from taas_tasks.airflow.scope import Scope, note_start, scope_of
from taas_tasks.airflow.triggers import HostJobTrigger, HostsTrigger
from taas_tasks.compute import jobs as on_host
from taas_tasks.compute.inventory import Host
from taas_tasks.compute.job import JobSpec, JobState
from taas_tasks.compute.jobs import Waiting
from taas_tasks.store import ObjectStore, open_store
from taas_tasks.values import PlacedJob, Placement

_log = logging.getLogger(__name__)

_INLINE_S = 4.0
_INLINE_LOOK_EVERY_S = 0.25
_LOG_TAIL_BYTES = 4096
_BACKSTOP_S = 120.0


@dataclass(frozen=True)
class Work:
    """What a task that runs jobs works with."""

    scope: Scope
    deployment: Deployment
    store: ObjectStore
    memory: Any

    @classmethod
    def of(cls, context: Mapping[str, Any]) -> Work:
        """Return what the running task works with."""
        deployment = read_deployment()
        return cls(scope_of(context), deployment, open_store(deployment.store), context["task_state_store"])

    def read(self, key: str, kind: type[Any]) -> Any:
        """Return a value of the run from the store."""
        return kind.model_validate_json(self.store.get(key))


@dataclass(frozen=True)
class Order:
    """What a task wants to run.

    Attributes:
        flavor: Of every host.
        num_hosts: At once.
        module: The program on each host.
        inputs: Gives the input of a node, from the placement and its rank; called just before the start.
        timeout_s: For how long the jobs may run.
        env: Gives the environment of the program; called just before the start, as it may hold secrets.
        requirements: Packages that the program's environment has besides those of the host.
        stopped_by: Task ids; when one of them has failed for good (or a state of ``stopped_by_states``), the jobs end.
    """

    flavor: str
    num_hosts: int
    module: str
    inputs: Callable[[Placement, int], BaseModel]
    timeout_s: float
    env: Callable[[], Mapping[str, str]] = dict
    requirements: Sequence[str] = ()
    stopped_by: Sequence[str] = ()
    stopped_by_states: Sequence[str] = ("failed", "upstream_failed")


class HostJobTask(ABC):
    """Runs a program on hosts of a flavor, each as one job; what it waits for, it waits for in the triggerer.

    One object per moment at which a worker is needed. Subclasses give the ``order`` and say what comes of it
    (``succeeded``, ``failed``, ``stopped``).
    """

    _watch: JobWatch | None = None

    @abstractmethod
    def order(self, work: Work) -> Order:
        """Return what is to run."""

    def before_start(self, work: Work, placement: Placement) -> None:  # noqa: B027 (most have nothing to do)
        """Do what must be done right before the jobs of a try are started."""

    @abstractmethod
    def succeeded(self, work: Work, placement: Placement) -> Any:
        """Return the task's result, now that every job succeeded."""

    def failed(self, work: Work, placement: Placement, error: TaasError) -> TaasError:
        """Return the error to raise; ``error`` is that of the first job that failed."""
        return error

    def stopped(self, reason: str) -> NoReturn:
        """Raise what ends this task when another one's failure has ended its jobs."""
        raise RunCancelled(reason)

    # --- the three moments at which a worker is needed ---

    def begin_or_go_on(self, context: Mapping[str, Any]) -> Any:
        """Go on where an earlier try left off, or begin."""
        note_start(context)
        work = Work.of(context)
        order = self.order(work)
        job = _host_job(work, order)
        found, placement = job.find()
        if found in ("alive", "succeeded"):
            _log.info("attaching to %s, which %s", _names(placement), found)
            return self._follow(work, order, job, placement)
        return self._place(work, order, job, placement)

    def hosts_held(self, context: Mapping[str, Any], event: dict[str, Any]) -> Any:
        """Go on when the hosts are held for us."""
        work = Work.of(context)
        order = self.order(work)
        job = _host_job(work, order)
        if event["status"] == "stopped":
            self.stopped(event["reason"])
        if event["status"] == "refused":
            raise HostRefused(event["reason"])
        placement = job.recall()
        if placement is None:
            raise JobLost("where the jobs of this task were to be is forgotten; it is tried again")
        return self._place(work, order, job, placement)

    def jobs_over(self, context: Mapping[str, Any], event: dict[str, Any]) -> Any:
        """Finish when the jobs are over."""
        work = Work.of(context)
        order = self.order(work)
        job = _host_job(work, order)
        placement = job.recall()
        if placement is None:
            raise JobLost("where the jobs of this task were is forgotten; it is tried again")
        if event["status"] == "refused":  # the jobs may live: a try after the connection was mended attaches to them
            raise HostRefused(event["reason"])
        if event["status"] == "unreachable":
            job.keep(placement.model_copy(update={"given_up": True}))
            raise HostUnreachable(event["reason"])
        look = job.watch(placement).look()
        if event["status"] == "ended":
            return self._finish(work, job, placement, look)
        job.clear_away(placement)
        job.record(placement, job.watch(placement).look().states)
        if event["status"] == "timeout":
            raise JobTimeout(event["reason"])
        return self.stopped(event["reason"])

    def cancel(self) -> None:
        """End the jobs that are ours, now that this worker is told to stop."""
        if self._watch is not None:
            self._watch.cancel()

    # --- steps ---

    def _place(self, work: Work, order: Order, job: HostJob, placement: Placement) -> Any:
        placed = job.place(placement)
        if isinstance(placed, Waiting):
            _log.info("%s", placed.reason)
            trigger = HostsTrigger(
                **work.scope.to_kwargs(),
                num_hosts=order.num_hosts,
                placement=placement.model_dump(mode="json"),
                stopped_by=list(order.stopped_by),
                stopped_by_states=list(order.stopped_by_states),
            )
            raise TaskDeferred(trigger=trigger, method_name="hosts_held")
        _log.info("starting %s", _names(placed))
        self.before_start(work, placed)
        job.start(placed, self._spec_maker(work, order, placed))
        return self._follow(work, order, job, placed)

    def _spec_maker(self, work: Work, order: Order, placement: Placement) -> Callable[[int, PlacedJob], JobSpec]:
        env = order.env()

        def make_spec(node_rank: int, placed: PlacedJob) -> JobSpec:
            return program_spec(
                placed,
                work.deployment.inventory.host(placed.host),
                env=env,
                module=order.module,
                input_json=order.inputs(placement, node_rank).model_dump_json(),
                files=key_files(work.deployment.store),
                owner=work.scope.owner,
                timeout_s=order.timeout_s,
                requirements=order.requirements,
            )

        return make_spec

    def _follow(self, work: Work, order: Order, job: HostJob, placement: Placement) -> Any:
        """Wait a moment for what is short; what is longer is followed by the triggerer."""
        watch = self._watch = job.watch(placement)
        give_up = time.monotonic() + _INLINE_S
        while True:
            look = watch.look()
            step = next_step(look, now=time.time(), deadline=float("inf"))
            for line in watch.last_lines() if step == "ended" else watch.new_lines():
                _log.info("%s", line)
            if step == "ended":
                return self._finish(work, job, placement, look)
            if step != "wait" or time.monotonic() > give_up:
                break
            time.sleep(_INLINE_LOOK_EVERY_S)
        trigger = HostJobTrigger(
            **work.scope.to_kwargs(),
            jobs=[placed.model_dump() for placed in placement.jobs],
            deadline=time.time() + order.timeout_s + _BACKSTOP_S,
            log_offsets=watch.shown_offsets,
            stopped_by=list(order.stopped_by),
            stopped_by_states=list(order.stopped_by_states),
        )
        raise TaskDeferred(trigger=trigger, method_name="jobs_over")

    def _finish(self, work: Work, job: HostJob, placement: Placement, look: Look) -> Any:
        job.watch(placement).bury()
        job.record(placement, look.states)
        job.release(placement)
        error = _first_failure(placement, look, job)
        if error is None:
            return self.succeeded(work, placement)
        raise self.failed(work, placement, error)


def _host_job(work: Work, order: Order) -> HostJob:
    candidates = work.deployment.inventory.of_flavor(order.flavor)
    return HostJob(
        scope=work.scope,
        wanted=Wanted(order.flavor, order.num_hosts, candidates),
        memory=work.memory,
        store=work.store,
        transports=OpenHosts().of(candidates),
    )


def _names(placement: Placement) -> str:
    return ", ".join(f"{job.job_id} on {job.host}" for job in placement.jobs)


def _first_failure(placement: Placement, look: Look, job: HostJob) -> TaasError | None:
    """Return the error of the first job that failed by itself, else of one that was ended; None for success."""
    pairs = zip(placement.jobs, look.states, strict=True)
    errors = [error for placed, state in pairs if (error := _error(placed, state, job)) is not None]
    own = [error for error in errors if not isinstance(error, RunCancelled)]
    return next(iter(own or errors), None)


def _error(placed: PlacedJob, state: JobState | None, job: HostJob) -> TaasError | None:
    if state is None:
        return JobLost(f"{placed.host} does not answer while its job {placed.job_id} should run", host=placed.host)
    tail = "" if went_well(state) else _log_tail(job, placed, state)
    error = on_host.failure(state, host=placed.host, log_tail=tail)
    if type(error) is JobFailed and state.signal is not None and not state.oom_killed:
        # Somebody or something killed the program: nothing says that it would happen again.
        return JobLost(error.message, **error.fields)
    return error


def _log_tail(job: HostJob, placed: PlacedJob, state: JobState) -> str:
    offset = max(0, state.log_bytes - _LOG_TAIL_BYTES)
    return on_host.log(job.transports[placed.host], placed.job_id, offset=offset, limit=_LOG_TAIL_BYTES).text


def hosts_of(work: Work, placement: Placement) -> list[Host]:
    """Return the hosts of a placement, node 0 first."""
    return [work.deployment.inventory.host(job.host) for job in placement.jobs]
