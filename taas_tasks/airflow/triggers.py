"""What the triggerer does while tasks wait: follow jobs on hosts, queue for hosts, look at the ledger.

A trigger's kwargs are stored and shown: they hold ids and numbers only. What blocks runs in threads. A triggerer that
dies cancels nothing: another one starts ``run()`` again, which looks at the hosts afresh.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from taas.errors import LaunchError, StoreRefused, StoreUnavailable, TaasError
from taas_tasks.airflow.deployment import ConnectionKeys, key_files, read_inventory, read_store_config
from taas_tasks.airflow.gate_watch import GateWatch
from taas_tasks.airflow.host_job import Wanted, owner_by_host, take_hosts
from taas_tasks.airflow.hosts import OpenHosts
from taas_tasks.airflow.job_watch import JobWatch, Look, next_step
from taas_tasks.airflow.scope import Scope, num_stopped, read_offsets, task_states, write_offsets
from taas_tasks.compute import jobs as on_host
from taas_tasks.compute.inventory import Inventory
from taas_tasks.store import open_store
from taas_tasks.values import PlacedJob, Placement, StoreConfig

_LOOK_EVERY_S = 1.0
_LOOK_LATER_EVERY_S = 3.0
_SOON_S = 120.0
_EXPLAIN_EVERY_S = 5.0
_KEEP_OFFSET_EVERY_S = 5.0
_STOP_WAIT_S = 30.0
_OVER = ("failed", "success", "skipped", "upstream_failed", "removed")

_kills: set[asyncio.Task[None]] = set()
"""What ``on_kill`` began: the triggerer drops the trigger after a second, this holds the work until it is done."""


class TaskTrigger(BaseTrigger):
    """Base: which try of which task waits, and what other tasks' failures end the wait."""

    def __init__(
        self,
        *,
        dag_id: str,
        run_id: str,
        task_id: str,
        map_index: int,
        owner: str,
        stopped_by: Sequence[str] = (),
        stopped_by_states: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.scope = Scope(dag_id, run_id, task_id, map_index, owner)
        self.stopped_by = list(stopped_by)
        self.stopped_by_states = list(stopped_by_states)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what makes this trigger anew elsewhere."""
        kwargs = {
            "dag_id": self.scope.dag_id,
            "run_id": self.scope.run_id,
            "task_id": self.scope.task_id,
            "map_index": self.scope.map_index,
            "owner": self.scope.owner,
            "stopped_by": self.stopped_by,
            "stopped_by_states": self.stopped_by_states,
        }
        return f"{__name__}.{type(self).__name__}", {**kwargs, **self.own_kwargs()}

    def own_kwargs(self) -> dict[str, Any]:
        """Return the kwargs that the base does not know."""
        return {}

    async def why_stop(self) -> str | None:
        """Return why waiting makes no sense any more, because of other tasks of the run."""
        if not self.stopped_by:
            return None
        names = " or ".join(self.stopped_by)
        count = await asyncio.to_thread(self.num_stopped)
        return f"stopped, as {names} of this run failed or was stopped" if count else None

    async def on_kill(self) -> None:
        """Undo, when a user has ended the task: goes on in the background for as long as it takes."""
        task = asyncio.create_task(asyncio.to_thread(self._undo_if_over))
        _kills.add(task)
        task.add_done_callback(_kills.discard)
        await asyncio.shield(task)

    def _undo_if_over(self) -> None:
        # A triggerer that stalled and came back is told to cancel what another one follows by now: the task still
        # waits then, or already runs again.
        if self.my_state() in _OVER:
            self.undo()

    def undo(self) -> None:
        """Give up what the task has on hosts, as far as it is still this try's."""

    # --- what is asked of Airflow: blocking, so from threads only ---

    def inventory(self) -> Inventory:
        """Return the hosts of this site."""
        return read_inventory()

    def store_config(self) -> StoreConfig:
        """Return where the store is, with the keys as they are now."""
        return read_store_config()

    def num_stopped(self) -> int:
        """Return how many instances of the tasks that can stop us are in a state that does."""
        return num_stopped(self.scope, self.stopped_by, states=self.stopped_by_states)

    def my_state(self) -> str | None:
        """Return the state of the task that waits."""
        return task_states(self.scope, [self.scope.task_id]).get(self.scope.state_name)

    def read_offsets(self) -> list[int]:
        """Return how far the logs of the jobs were shown before."""
        return read_offsets(self.scope)

    def write_offsets(self, offsets: Sequence[int]) -> None:
        """Keep how far the logs of the jobs were shown."""
        write_offsets(self.scope, offsets)


class HostsTrigger(TaskTrigger):
    """Queues for hosts. Fires ``{"status": "held" | "stopped" | "refused", "reason": ...}``."""

    def __init__(self, *, num_hosts: int, placement: dict[str, Any], **base: Any) -> None:
        super().__init__(**base)
        self.num_hosts = num_hosts
        self.placement = Placement.model_validate(placement)
        self._open_hosts = OpenHosts()

    def own_kwargs(self) -> dict[str, Any]:
        """Return the kwargs that the base does not know."""
        return {"num_hosts": self.num_hosts, "placement": self.placement.model_dump(mode="json")}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Ask for the hosts until they are held."""
        told = ""
        while True:
            try:
                waiting = await asyncio.to_thread(self._ask)
            except LaunchError as error:
                yield TriggerEvent({"status": "refused", "reason": error.message})
                return
            if waiting is None:
                yield TriggerEvent({"status": "held", "reason": "the hosts are held"})
                return
            if waiting != told:
                self.log.info("%s", waiting)
                told = waiting
            if why := await self.why_stop():
                await asyncio.to_thread(self.undo)
                yield TriggerEvent({"status": "stopped", "reason": why})
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def _wanted(self) -> Wanted:
        flavor = self.placement.flavor
        return Wanted(flavor, self.num_hosts, self.inventory().of_flavor(flavor))

    def _ask(self) -> str | None:
        """Return why the hosts are not ours yet, or None when they are."""
        wanted = self._wanted()
        transports = self._open_hosts.of(wanted.candidates)
        answer = take_hosts(self.scope, wanted, self.placement, transports)
        return answer.reason if isinstance(answer, on_host.Waiting) else None

    def undo(self) -> None:
        """Leave the queue."""
        wanted = self._wanted()
        transports = self._open_hosts.of(wanted.candidates)
        on_host.withdraw(transports, owner_by_host(self.scope, wanted, self.placement.generation))


class HostJobTrigger(TaskTrigger):
    """Follows jobs until they are over; shows their logs, keeps the leases, ends the peers of a failed one.

    Fires ``{"status": "ended" | "stopped" | "timeout" | "unreachable" | "refused", "reason": ...}``.
    """

    def __init__(
        self,
        *,
        jobs: list[dict[str, str]],
        deadline: float,
        log_offsets: Sequence[int] = (),
        log_offset: int = 0,  # of the first job alone: triggers that were stored before all logs were shown
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.jobs = [PlacedJob.model_validate(job) for job in jobs]
        self.deadline = deadline
        self.log_offsets = list(log_offsets) or [log_offset]
        self._kept_at = 0.0

    def own_kwargs(self) -> dict[str, Any]:
        """Return the kwargs that the base does not know; how far the log was shown since is kept elsewhere."""
        jobs = [job.model_dump() for job in self.jobs]
        return {"jobs": jobs, "deadline": self.deadline, "log_offsets": self.log_offsets}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look at the jobs until they are over, or must be ended."""
        watch = await asyncio.to_thread(self._open)
        watch.start_logs_at(self.log_offsets, await asyncio.to_thread(self.read_offsets))
        since = time.monotonic()
        while True:
            try:
                look = await asyncio.to_thread(watch.look)
                await self._show(watch)
            except LaunchError as error:
                yield TriggerEvent({"status": "refused", "reason": error.message})
                return
            step = next_step(look, now=time.time(), deadline=self.deadline)
            if step == "cancel":
                await asyncio.to_thread(watch.cancel)
            elif step != "wait":
                yield await self._event(watch, step)
                return
            elif why := await self.why_stop():
                await self._end(watch)
                yield TriggerEvent({"status": "stopped", "reason": why})
                return
            soon = time.monotonic() - since < _SOON_S
            await asyncio.sleep(_LOOK_EVERY_S if soon else _LOOK_LATER_EVERY_S)

    def _open(self) -> JobWatch:
        inventory = self.inventory()
        transports = OpenHosts().of(inventory.host(job.host) for job in self.jobs)
        owner = self.scope.owner
        return JobWatch(transports=transports, jobs=self.jobs, owner=owner, fresh_files=self._fresh_files)

    def _fresh_files(self) -> dict[str, str]:
        """Return the store's session credentials as they are now: the jobs may have begun with earlier ones."""
        try:
            return key_files(self.store_config())
        except StoreRefused as error:
            self.log.warning("%s", error)
            return {}

    async def _show(self, watch: JobWatch, *, last: bool = False) -> None:
        lines = await asyncio.to_thread(watch.last_lines if last else watch.new_lines)
        for line in lines:
            self.log.info("%s", line)
        if (lines or last) and (last or time.monotonic() - self._kept_at > _KEEP_OFFSET_EVERY_S):
            self._kept_at = time.monotonic()
            await asyncio.to_thread(self.write_offsets, watch.shown_offsets)

    async def _event(self, watch: JobWatch, status: str) -> TriggerEvent:
        if status == "timeout":
            await self._end(watch)
        await self._show(watch, last=True)
        hosts = ", ".join(job.host for job in self.jobs)
        reasons = {
            "ended": "the jobs are over",
            "timeout": "the jobs ran longer than allowed",
            "unreachable": f"{hosts}: no answer for longer than a job lives without us",
        }
        return TriggerEvent({"status": status, "reason": reasons[status]})

    async def _end(self, watch: JobWatch) -> None:
        """Cancel the jobs and wait until they are over."""
        await asyncio.to_thread(watch.cancel)
        give_up = time.monotonic() + _STOP_WAIT_S
        while time.monotonic() < give_up:
            look: Look = await asyncio.to_thread(watch.look)
            if not look.any_lives:
                break
            await asyncio.sleep(_LOOK_EVERY_S / 4)

    def undo(self) -> None:
        """Cancel the jobs that are still this try's."""
        self._open().cancel()


class GateTrigger(TaskTrigger):
    """Looks at the ledger. Fires ``{"status": "open" | "failed", "reason": ...}``."""

    def __init__(self, *, deadline: float, **base: Any) -> None:
        super().__init__(**base)
        self.deadline = deadline

    def own_kwargs(self) -> dict[str, Any]:
        """Return the kwargs that the base does not know."""
        return {"deadline": self.deadline}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until the gate is open or cannot open any more."""
        watch = await asyncio.to_thread(self.open_watch)
        reason, explained_at = "", 0.0
        while True:
            try:
                decision = await asyncio.to_thread(watch.look)
            except StoreUnavailable as error:
                self.log.warning("%s; looking again", error)
            except TaasError as error:
                yield TriggerEvent({"status": "failed", "reason": error.message})
                return
            else:
                if decision.is_open:
                    yield TriggerEvent({"status": "open", "reason": decision.reason})
                    return
                if decision.reason != reason and time.monotonic() - explained_at >= _EXPLAIN_EVERY_S:
                    self.log.info("%s", decision.reason)
                    reason, explained_at = decision.reason, time.monotonic()
            why = await self.why_stop()
            if why is None and time.time() > self.deadline:
                why = "preparing took longer than the gate waits"
            if why:
                yield TriggerEvent({"status": "failed", "reason": why})
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def open_watch(self) -> GateWatch:
        """Return what looks at the run's ledgers."""
        config = self.store_config()
        credentials = None if config.session_token is None else ConnectionKeys(config, read=self.store_config)
        return GateWatch.of_run(open_store(config, credentials=credentials), self.scope.run)
