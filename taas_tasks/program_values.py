"""The inputs of the programs on hosts: made by the Airflow tasks, read by the programs. They travel in 0600 files.

An outcome goes the other way (``outcome.json``); docs/architecture.md lists both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict

from taas_tasks.values import LaunchPlan, StoreConfig, Value


class ProgramInput(Value):
    """What every program is given. A host passes over fields that it does not know."""

    model_config = ConfigDict(extra="ignore")

    store: StoreConfig
    run: str
    run_id: str
    project: str
    snapshot: str
    generation: int
    host: str
    host_root: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the input that a job was given, with the paths of what lies beside it made whole."""
        given = cls.model_validate_json(path.read_bytes())
        if given.store.credentials_path is None:
            return given
        beside = str(path.parent / given.store.credentials_path)
        return given.model_copy(update={"store": given.store.model_copy(update={"credentials_path": beside})})


class InspectInput(ProgramInput):
    """What to inspect. ``units``: elements asked for; a sampler of the user's is run for so many."""

    loader: str
    source: str | None = None
    payload: str | None = None
    sha256: str | None = None
    seed: int
    randomness: Literal["element", "exact"]
    units: int
    allow_pickle: bool = False


class PrepareInput(ProgramInput):
    """What to prepare: the key of the ``Plan``, the loader, and which of its machines this is."""

    plan: str
    loader: str
    machine: int
    allow_pickle: bool = False


class AgentInput(ProgramInput):
    """One node of a training. ``secrets`` are environment variables too, but are shown nowhere."""

    version: Literal[1] = 1
    launch_plan: LaunchPlan
    node_rank: int
    address: str = "127.0.0.1"
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
