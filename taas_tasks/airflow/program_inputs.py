"""The inputs of the programs on hosts, as docs/architecture.md lists them. They travel in 0600 files, never in argv."""

from __future__ import annotations

from typing import Any, Literal

from taas_tasks.airflow.deployment import as_on_hosts
from taas_tasks.compute.inventory import Host
from taas_tasks.values import LaunchPlan, PinnedRequest, Placement, StoreConfig, Value


class ProgramInput(Value):
    """What every program is given."""

    store: StoreConfig
    run: str
    run_id: str
    project: str
    snapshot: str
    generation: int
    host: str
    host_root: str


class InspectInput(ProgramInput):
    """Input of ``taas_tasks.prep.inspect_program``."""

    loader: str
    source: str | None
    payload: str | None
    sha256: str | None
    seed: int
    randomness: Literal["element", "exact"]
    units: int
    allow_pickle: bool


class PrepareInput(ProgramInput):
    """Input of ``taas_tasks.prep.prepare_program``; ``plan`` is a key."""

    plan: str
    loader: str
    machine: int
    allow_pickle: bool


class AgentInput(ProgramInput):
    """Input of ``taas_tasks.launch.agent_program``."""

    launch_plan: LaunchPlan
    node_rank: int
    address: str
    env: dict[str, str]
    secrets: dict[str, str]


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
