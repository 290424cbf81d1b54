"""What runs on cheap machines: the inspection of a loader, and one machine's share of its preparation."""

from __future__ import annotations

import logging
from typing import Any

from airflow.sdk.exceptions import AirflowSkipException

from taas.errors import TaasError
from taas.flavors import PREP_FLAVOR
from taas.request import TrainRequest
from taas_tasks.airflow.host_job_task import HostJobTask, Order, Work, hosts_of
from taas_tasks.airflow.program_inputs import common_input
from taas_tasks.airflow.secret_values import resolve_secrets
from taas_tasks.program_values import InspectInput, PrepareInput
from taas_tasks.values import Inspection, PinnedRequest, Placement

_log = logging.getLogger(__name__)

_INSPECT_TIMEOUT_S = 3600.0
_PREPARE_TIMEOUT_S = 14 * 86400.0


def loader_environment(request: TrainRequest) -> dict[str, str]:
    """Return the environment of the user's loaders: that of the ranks, secrets too, as they may read a bucket.

    Strings hash alike on all machines, so that a dataset that iterates over a set does so in one order everywhere.
    """
    return {"PYTHONHASHSEED": "0", **request.env, **resolve_secrets(request.secrets, project=request.project)}


class InspectTask(HostJobTask):
    """Finds out about one loader on a cheap machine, before anything costly starts."""

    def __init__(self, loader: str) -> None:
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
            requirements=request.requirements,
        )

    def succeeded(self, work: Work, placement: Placement) -> None:
        """Show what was found."""
        found: Inspection = work.read(work.scope.keys.inspection(self.loader), Inspection)
        length = found.epoch_length if found.epoch_length is not None else "unknown"
        _log.info(
            "%s: %s, %s order, epoch of %s elements, %.0f bytes and %.4f s each",
            self.loader, found.kind, found.order, length, found.element_bytes, found.element_seconds,
        )  # fmt: skip
        for warning in found.warnings:
            _log.warning("%s: %s", self.loader, warning)


class PrepareTask(HostJobTask):
    """One machine's share of one loader: elements become shards. A retry skips what is committed."""

    def __init__(self, loader: str, *, machine: int) -> None:
        self.loader = loader
        self.machine = machine

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
            requirements=pinned.request.requirements,
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
