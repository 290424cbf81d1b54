"""What the inputs of all programs on hosts have in common, as an Airflow task fills it in."""

from __future__ import annotations

from typing import Any

from taas_tasks.airflow.deployment import as_on_hosts
from taas_tasks.compute.inventory import Host
from taas_tasks.values import PinnedRequest, Placement, StoreConfig


def common_input(store: StoreConfig, pinned: PinnedRequest, placement: Placement, host: Host) -> dict[str, Any]:
    """Return the fields that every input has."""
    return {
        "store": as_on_hosts(store),
        "run": pinned.run,
        "run_id": pinned.run_id,
        "project": pinned.request.project,
        "snapshot": pinned.snapshot,
        "generation": placement.generation,
        "host": host.name,
        "host_root": host.root,
    }
