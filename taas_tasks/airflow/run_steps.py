"""The steps of a run that need no machine: validate, plan, upload, release, report."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from taas.errors import RequestError
from taas.flavors import PREP_FLAVOR, hosts_for
from taas.request import TrainRequest, parse_request
from taas_tasks import project as repository
from taas_tasks.airflow.deployment import Deployment, read_deployment, read_flavors, read_store_config
from taas_tasks.airflow.hosts import check_connections
from taas_tasks.airflow.run_release import release_run
from taas_tasks.airflow.run_report import write_report
from taas_tasks.airflow.scope import note_start, scope_of, task_states
from taas_tasks.airflow.secret_values import resolve_secrets
from taas_tasks.artifacts import publish, read_staged
from taas_tasks.plan import describe, make_plan
from taas_tasks.store import ObjectStore, open_store
from taas_tasks.store.check import refuse_unfit_store
from taas_tasks.values import Inspection, PinnedRequest, Placement, Plan

_log = logging.getLogger(__name__)

_MAX_CLOCK_SKEW_S = 300.0


def check_deployment(request: TrainRequest, deployment: Deployment) -> None:
    """Refuse a request that this site has no machines for.

    Raises:
        RequestError: with every fault.
        HostRefused: hosts of these flavors have connections that cannot be used; none was contacted.
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
    check_connections(host for host in deployment.inventory.hosts if host.flavor in wanted)


def named_files(request: TrainRequest) -> dict[str, str]:
    """Return the project's files that a request names, by field: its script, and the files of its loaders."""
    files = {} if request.script is None else {"script": request.script}
    sources = {name: ref.source for name, ref in request.loaders.items() if ref.source is not None}
    return files | {f"loaders.{name}": source.rpartition(":")[0] for name, source in sources.items()}


def pin(store: ObjectStore, run_id: str, run: str, request: TrainRequest) -> PinnedRequest:
    """Return the request with the project's head as its snapshot.

    Raises:
        RequestError: names every file that the request asks for and the project does not have.
    """
    number, snapshot = repository.head(store, request.project)
    there = repository.snapshot_files(store, request.project, snapshot)
    faults = [
        {
            "field": field,
            "message": f"project {request.project!r} has no file {path!r} (record {number}); put it there: "
            f"taas project put {request.project} FOLDER",
        }
        for field, path in named_files(request).items()
        if path not in there
    ]
    if faults:
        raise RequestError("\n".join(f"{fault['field']}: {fault['message']}" for fault in faults), faults=faults)
    return PinnedRequest(run_id=run_id, run=run, request=request, snapshot=snapshot, base_record=number)


def validate(context: Mapping[str, Any]) -> list[str]:
    """Check request and deployment before any machine is taken, and pin the project; a retry keeps the first pin.

    Returns the names of the loaders to prepare.
    """
    note_start(context)
    scope = scope_of(context)
    deployment = read_deployment()
    request = parse_request(context["dag_run"].conf or {}, flavors=deployment.flavors)
    check_deployment(request, deployment)
    resolve_secrets(request.secrets, project=request.project)  # that they are there; they are read again when needed
    store = open_store(deployment.store)
    fitness = refuse_unfit_store(store)
    if abs(fitness.clock_skew_s) > _MAX_CLOCK_SKEW_S:
        _log.warning("the store's clock is %.0f s off: signatures may be refused", fitness.clock_skew_s)
    store.put_if_absent(scope.keys.request, pin(store, scope.run_id, scope.run, request).to_bytes())
    pinned = PinnedRequest.model_validate_json(store.get(scope.keys.request))
    _log.info("project %s at record %d, snapshot %s", request.project, pinned.base_record, pinned.snapshot)
    return sorted(request.loaders) if request.cpus else []


def plan(context: Mapping[str, Any]) -> Plan:
    """Make the plan, write it and print it."""
    note_start(context)
    keys = scope_of(context).keys
    flavors = read_flavors()
    store = open_store(read_store_config())
    pinned = PinnedRequest.model_validate_json(store.get(keys.request))
    loaders = pinned.request.loaders if pinned.request.cpus else {}
    found = {name: Inspection.model_validate_json(store.get(keys.inspection(name))) for name in loaders}
    made = make_plan(pinned, found, flavors)
    store.put(keys.plan, made.to_bytes())
    for line in describe(made, flavors).splitlines():
        _log.info("%s", line)
    return made


def shares(made: Plan) -> list[dict[str, Any]]:
    """Return what ``prepare`` is mapped over: one item per loader and machine."""
    return [
        {"loader": name, "machine": machine, "machines": loader.machines}
        for name, loader in made.loaders.items()
        for machine in range(loader.machines)
    ]


def upload(context: Mapping[str, Any]) -> int:
    """Publish what rank 0 of the current try wrote as one numbered record of the project; return its number."""
    note_start(context)
    scope = scope_of(context)
    store = open_store(read_store_config())
    pinned = PinnedRequest.model_validate_json(store.get(scope.keys.request))
    generation = Placement.model_validate_json(store.get(scope.keys.placement("train", -1))).generation
    staged = read_staged(store, scope.run, generation)
    record = publish(store, staged, project=pinned.request.project, base_record=pinned.base_record)
    store.put(scope.keys.artifacts, record.to_bytes())
    for note in staged.notes:
        _log.warning("%s", note)
    for artifact in record.files:
        _log.info("%s  %d bytes  sha256 %s", artifact.path, artifact.bytes, artifact.sha256)
    for path, kept in record.kept_beside.items():
        _log.warning("%s was changed by someone else meanwhile: ours is kept as %s", path, kept)
    return record.record


def release(context: Mapping[str, Any]) -> None:
    """End what lives of the run's jobs on all hosts and give the hosts back."""
    note_start(context)
    scope = scope_of(context)
    deployment = read_deployment()
    for line in release_run(scope, deployment, open_store(deployment.store), task_states(scope)):
        _log.info("%s", line)


def report(context: Mapping[str, Any]) -> str:
    """Write the report, whatever happened; return its key.

    Raises:
        AirflowFailException: the run failed (so the run's state is this task's).
    """
    note_start(context)
    scope = scope_of(context)
    made, text = write_report(context, scope, open_store(read_store_config()), read_flavors())
    for line in text.splitlines():
        _log.info("%s", line)
    if made.state == "failed":
        raise AirflowFailException(made.verdict or "the run failed")
    return scope.keys.report
