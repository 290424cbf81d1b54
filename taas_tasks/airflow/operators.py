"""The DAG's operators, but for the gate: thin, so that a DAG file imports little; their work is imported when they run.

XCom carries names and numbers only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.bases.skipmixin import SkipMixin

if TYPE_CHECKING:
    from taas_tasks.airflow.host_job_task import HostJobTask


class ValidateOperator(BaseOperator):
    """Checks the request and the deployment, pins the project; returns the names of the loaders to prepare."""

    def execute(self, context: Mapping[str, Any]) -> list[str]:
        """See ``run_steps.validate``."""
        from taas_tasks.airflow import run_steps

        return run_steps.validate(context)


class PlanOperator(BaseOperator, SkipMixin):
    """Makes and prints the plan; returns the shares of ``prepare``; without any, the tasks of ``skips`` are skipped."""

    def __init__(self, *, skips: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.skips = list(skips)

    def execute(self, context: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See ``run_steps.plan``."""
        from taas_tasks.airflow import run_steps

        shares = run_steps.shares(run_steps.plan(context))
        if not shares:
            self.skip(context["ti"], [self.dag.get_task(name) for name in self.skips])
        return shares


class HostJobOperator(BaseOperator):
    """Runs jobs on hosts, across deferrals and retries; see ``host_job_task.HostJobTask``."""

    _task: HostJobTask | None = None

    @abstractmethod
    def make_task(self) -> HostJobTask:
        """Return what does the work."""

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Begin, or go on where an earlier try left off."""
        self._task = self.make_task()
        return self._task.begin_or_go_on(context)

    def hosts_held(self, context: Mapping[str, Any], event: dict[str, Any]) -> Any:
        """Go on when the hosts are held."""
        self._task = self.make_task()
        return self._task.hosts_held(context, event)

    def jobs_over(self, context: Mapping[str, Any], event: dict[str, Any]) -> Any:
        """Finish when the jobs are over."""
        self._task = self.make_task()
        return self._task.jobs_over(context, event)

    def on_kill(self) -> None:
        """End the jobs when this worker is told to stop."""
        if self._task is not None:
            self._task.cancel()


class InspectOperator(HostJobOperator):
    """Finds out about one loader on a cheap machine, before anything costly starts."""

    def __init__(self, *, loader: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loader = loader

    def make_task(self) -> HostJobTask:
        """See the base."""
        from taas_tasks.airflow.prep_tasks import InspectTask

        return InspectTask(self.loader)


class PrepareOperator(HostJobOperator):
    """One machine's share of one loader: elements become shards. A retry skips what is committed."""

    def __init__(self, *, loader: str, machine: int, machines: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loader = loader
        self.machine = machine
        self.machines = machines

    def make_task(self) -> HostJobTask:
        """See the base."""
        from taas_tasks.airflow.prep_tasks import PrepareTask

        return PrepareTask(self.loader, machine=self.machine)


class TrainOperator(HostJobOperator):
    """Trains on a gang of GPU hosts; has succeeded when rank 0's files are staged."""

    def make_task(self) -> HostJobTask:
        """See the base."""
        from taas_tasks.airflow.train_task import TrainTask

        return TrainTask()


class UploadOperator(BaseOperator):
    """Publishes what rank 0 of the current try wrote as one numbered record of the project; returns its number."""

    def execute(self, context: Mapping[str, Any]) -> int:
        """See ``run_steps.upload``."""
        from taas_tasks.airflow import run_steps

        return run_steps.upload(context)


class ReleaseOperator(BaseOperator):
    """Teardown: ends what lives of the run on all hosts and gives the hosts back; also after a cancelled run."""

    def execute(self, context: Mapping[str, Any]) -> None:
        """See ``run_steps.release``."""
        from taas_tasks.airflow import run_steps

        run_steps.release(context)


class ReportOperator(BaseOperator):
    """Teardown: writes the report, always; fails when the run failed, and so decides the run's state."""

    def execute(self, context: Mapping[str, Any]) -> str:
        """See ``run_steps.report``."""
        from taas_tasks.airflow import run_steps

        return run_steps.report(context)
