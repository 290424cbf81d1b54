"""The gate: waits, without holding a worker, until training may start."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import BaseSensorOperator

from taas.errors import PrepareError
from taas_tasks.airflow.scope import note_start, scope_of

_MAX_WAIT = timedelta(days=14)


class GateSensor(BaseSensorOperator):
    """Opens when every loader's contiguous prepared prefix reaches its starting units; explains itself in its log.

    Fails at once when a ``prepare`` of the run has failed for good.
    """

    def __init__(self, *, timeout: timedelta = _MAX_WAIT, **kwargs: Any) -> None:
        super().__init__(timeout=timeout, **kwargs)

    def poke(self, context: Mapping[str, Any]) -> bool:
        """Look once."""
        from taas_tasks.airflow.deployment import read_store_config
        from taas_tasks.airflow.gate_watch import GateWatch
        from taas_tasks.store import open_store

        scope = scope_of(context)
        decision = GateWatch.of_run(open_store(read_store_config()), scope.run).look()
        self.log.info("%s", decision.reason)
        return decision.is_open

    def execute(self, context: Mapping[str, Any]) -> None:
        """Look once, then let the triggerer look."""
        from taas_tasks.airflow.triggers import GateTrigger

        note_start(context)
        if self.poke(context):
            return
        scope = scope_of(context)
        trigger = GateTrigger(
            **scope.to_kwargs(),
            deadline=time.time() + self.timeout,
            stopped_by=["prepare"],
            stopped_by_states=["failed", "upstream_failed", "skipped"],
        )
        self.defer(trigger=trigger, method_name="execute_complete")

    def execute_complete(self, context: Mapping[str, Any], event: dict[str, Any]) -> None:
        """Succeed when the gate is open.

        Raises:
            PrepareError: preparing failed or took too long, so the gate will not open.
        """
        self.log.info("%s", event["reason"])
        if event["status"] != "open":
            raise PrepareError(event["reason"])
