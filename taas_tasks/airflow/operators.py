"""The tasks of a run, but for ``gate`` and ``train``. XCom carries names and numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.bases.skipmixin import SkipMixin
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from taas.errors import RequestError, TaasError
from taas.flavors import PREP_FLAVOR, hosts_for
from taas.request import TrainRequest, parse_request
from taas_tasks import project as repository
from taas_tasks.airflow.deployment import Deployment, read_deployment, read_flavors, read_store_config
from taas_tasks.airflow.host_job_operator import HostJobOperator, Order, Work, hosts_of
from taas_tasks.airflow.program_inputs import InspectInput, PrepareInput, common_input
from taas_tasks.airflow.run_release import release_run
from taas_tasks.airflow.run_report import write_report
from taas_tasks.airflow.scope import note_start, scope_of, task_states
from taas_tasks.airflow.secret_values import resolve_secrets
from taas_tasks.artifacts import publish
from taas_tasks.plan import describe, make_plan
from taas_tasks.store import ObjectStore, open_store
from taas_tasks.store.check import refuse_unfit_store
from taas_tasks.values import Inspection, PinnedRequest, Placement, StagedArtifacts

_INSPECT_TIMEOUT_S = 3600.0
_PREPARE_TIMEOUT_S = 14 * 86400.0
_MAX_CLOCK_SKEW_S = 300.0


def check_deployment(request: TrainRequest, deployment: Deployment) -> None:
    """Refuse a request that this site has no machines for.

    Raises:
        RequestError: with every fault.
    """
    num_hosts = hosts_for(deployment.flavors[request.flavor], request.gpus)
    wanted = {request.flavor: num_hosts, **({PREP_FLAVOR: 1} if request.cpus else {})}
    faults = []
    for flavor, count in wanted.items():
        there = sum(1 for host in deployment.inventory.hosts if host.flavor == flavor)
        if there < count:
            hosts = "host" if count == 1 else "hosts"
            message = f"needs {count} {hosts} of {flavor}, the inventory has {there}; ask for less, or add hosts"
            faults.append({"field": "gpus" if flavor == request.flavor else "cpus", "message": message})
    if faults:
        raise RequestError("\n".join(f"{fault['field']}: {fault['message']}" for fault in faults), faults=faults)


def pin(store: ObjectStore, run_id: str, run: str, request: TrainRequest) -> PinnedRequest:
    """Return the request with the project's head as its snapshot."""
    number, snapshot = repository.head(store, request.project)
    if request.script is not None and request.script not in repository.snapshot_files(store, request.project, snapshot):
        message = (
            f"project {request.project!r} has no file {request.script!r} (record {number}); put it there: "
            f"taas project put {request.project} FOLDER"
        )
        raise RequestError(f"script: {message}", faults=[{"field": "script", "message": message}])
    return PinnedRequest(run_id=run_id, run=run, request=request, snapshot=snapshot, base_record=number)


def loader_environment(request: TrainRequest) -> dict[str, str]:
    """Return the environment of the user's loaders: that of the ranks, secrets too, as they may read a bucket."""
    return {**request.env, **resolve_secrets(request.secrets, project=request.project)}


class ValidateOperator(BaseOperator):
    """Checks the request and the deployment before any machine is taken, and pins the project.

    Returns the names of the loaders to prepare. A retry keeps the first try's pin.
    """

    def execute(self, context: Mapping[str, Any]) -> list[str]:
        """See the class."""
        note_start(context)
        scope = scope_of(context)
        deployment = read_deployment()
        request = parse_request(context["dag_run"].conf or {}, flavors=deployment.flavors)
        check_deployment(request, deployment)
        store = open_store(deployment.store)
        fitness = refuse_unfit_store(store)
        if abs(fitness.clock_skew_s) > _MAX_CLOCK_SKEW_S:
            self.log.warning("the store's clock is %.0f s off: signatures may be refused", fitness.clock_skew_s)
        pinned = pin(store, scope.run_id, scope.run, request)
        store.put_if_absent(scope.keys.request, pinned.to_bytes())
        pinned = PinnedRequest.model_validate_json(store.get(scope.keys.request))
        self.log.info("project %s at record %d, snapshot %s", request.project, pinned.base_record, pinned.snapshot)
        return sorted(request.loaders) if request.cpus else []


class InspectOperator(HostJobOperator):
    """Finds out about one loader on a cheap machine, before anything costly starts."""

    def __init__(self, *, loader: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loader = loader

    def order(self, work: Work) -> Order:
        """Return the inspection of the loader."""
        pinned: PinnedRequest = work.read(work.scope.keys.request, PinnedRequest)
        request = pinned.request
        reference = request.loaders[self.loader]

        def inputs(placement: Placement, _node_rank: int) -> InspectInput:
            return InspectInput(
                **common_input(work.deployment.store, pinned, placement, hosts_of(work, placement)[0]),
                loader=self.loader,
                source=reference.source,
                payload=reference.payload,
                sha256=reference.sha256,
                seed=request.seed,
                randomness=request.randomness,
                units=request.units_of(self.loader) or 0,
                allow_pickle=request.allow_pickle,
            )

        return Order(
            PREP_FLAVOR,
            1,
            "taas_tasks.prep.inspect_program",
            inputs,
            _INSPECT_TIMEOUT_S,
            env=lambda: loader_environment(request),
        )

    def succeeded(self, work: Work, placement: Placement) -> None:
        """Show what was found."""
        found: Inspection = work.read(work.scope.keys.inspection(self.loader), Inspection)
        length = found.epoch_length if found.epoch_length is not None else "unknown"
        self.log.info(
            "%s: %s, %s order, epoch of %s elements, %.0f bytes and %.4f s each",
            self.loader, found.kind, found.order, length, found.element_bytes, found.element_seconds,
        )  # fmt: skip
        for warning in found.warnings:
            self.log.warning("%s: %s", self.loader, warning)


class PlanOperator(BaseOperator, SkipMixin):
    """Makes the plan and prints it.

    Returns one item per loader and machine; with none, the tasks of ``skips`` are skipped.
    """

    def __init__(self, *, skips: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.skips = list(skips)

    def execute(self, context: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See the class."""
        note_start(context)
        scope = scope_of(context)
        flavors = read_flavors()
        store = open_store(read_store_config())
        pinned = PinnedRequest.model_validate_json(store.get(scope.keys.request))
        loaders = pinned.request.loaders if pinned.request.cpus else {}
        found = {name: Inspection.model_validate_json(store.get(scope.keys.inspection(name))) for name in loaders}
        plan = make_plan(pinned, found, flavors)
        store.put(scope.keys.plan, plan.to_bytes())
        for line in describe(plan, flavors).splitlines():
            self.log.info("%s", line)
        if not plan.loaders:
            self.skip(context["ti"], [self.dag.get_task(name) for name in self.skips])
        return [
            {"loader": name, "machine": machine, "machines": loader.machines}
            for name, loader in plan.loaders.items()
            for machine in range(loader.machines)
        ]


class PrepareOperator(HostJobOperator):
    """One machine's share of one loader: elements become shards. A retry skips what is committed."""

    def __init__(self, *, loader: str, machine: int, machines: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loader = loader
        self.machine = machine
        self.machines = machines

    def order(self, work: Work) -> Order:
        """Return this machine's share of the loader."""
        pinned: PinnedRequest = work.read(work.scope.keys.request, PinnedRequest)

        def inputs(placement: Placement, _node_rank: int) -> PrepareInput:
            return PrepareInput(
                **common_input(work.deployment.store, pinned, placement, hosts_of(work, placement)[0]),
                plan=work.scope.keys.plan,
                loader=self.loader,
                machine=self.machine,
                allow_pickle=pinned.request.allow_pickle,
            )

        return Order(
            PREP_FLAVOR,
            1,
            "taas_tasks.prep.prepare_program",
            inputs,
            _PREPARE_TIMEOUT_S,
            env=lambda: loader_environment(pinned.request),
            stopped_by=("gate", "train"),
        )

    def succeeded(self, work: Work, placement: Placement) -> None:
        """Nothing more: the ledger tells what was done."""

    def failed(self, work: Work, placement: Placement, error: TaasError) -> TaasError:
        """Tell the hosts that train as well when this is for good."""
        if not error.retryable:
            work.store.put_if_absent(work.scope.keys.abort, f"{work.scope.state_name}: {error.message}".encode())
        return error

    def stopped(self, reason: str) -> Any:
        """Skip: the task that failed is to be the red one."""
        raise AirflowSkipException(reason)


class UploadOperator(BaseOperator):
    """Publishes what rank 0 of the current try wrote as one numbered record of the project. Returns its number."""

    def execute(self, context: Mapping[str, Any]) -> int:
        """See the class."""
        note_start(context)
        scope = scope_of(context)
        store = open_store(read_store_config())
        pinned = PinnedRequest.model_validate_json(store.get(scope.keys.request))
        generation = Placement.model_validate_json(store.get(scope.keys.placement("train", -1))).generation
        staged = StagedArtifacts.model_validate_json(store.get(scope.keys.staged(generation)))
        record = publish(store, staged, project=pinned.request.project)
        store.put(scope.keys.artifacts, record.to_bytes())
        for artifact in record.files:
            self.log.info("%s  %d bytes  sha256 %s", artifact.path, artifact.bytes, artifact.sha256)
        for path, kept in record.kept_beside.items():
            self.log.warning("%s was changed by someone else meanwhile: ours is kept as %s", path, kept)
        return record.record


class ReleaseOperator(BaseOperator):
    """Teardown: ends what lives of the run's jobs on all hosts and gives the hosts back; also after a cancelled run."""

    def execute(self, context: Mapping[str, Any]) -> None:
        """See the class."""
        note_start(context)
        scope = scope_of(context)
        deployment = read_deployment()
        for line in release_run(scope, deployment, open_store(deployment.store), task_states(scope)):
            self.log.info("%s", line)


class ReportOperator(BaseOperator):
    """Teardown: writes the report, always; fails when the run failed, and so decides the run's state."""

    def execute(self, context: Mapping[str, Any]) -> str:
        """See the class."""
        note_start(context)
        scope = scope_of(context)
        store = open_store(read_store_config())
        report, text = write_report(context, scope, store, read_flavors())
        for line in text.splitlines():
            self.log.info("%s", line)
        if report.state == "failed":
            raise AirflowFailException(report.verdict or "the run failed")
        return scope.keys.report
