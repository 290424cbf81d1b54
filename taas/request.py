"""The training request: the conf JSON of one run, checked."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class PayloadRef(BaseModel):
    """An uploaded payload: its key in the store and the sha256 that hosts verify before they open it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    payload: str
    sha256: str


class LoaderRef(BaseModel):
    """A loader of the request: a source in the project (``"data.py:make_loader"``) or an uploaded payload."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: str | None = None
    payload: str | None = None
    sha256: str | None = None
    units: int | None = None


class TrainRequest(BaseModel):
    """One training request."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    project: str
    script: str | None = None
    args: tuple[str, ...] = ()
    cell: PayloadRef | None = None
    flavor: str = "g2.8"
    gpus: int = 8
    cpus: int | None = None
    units: int | None = None
    loaders: dict[str, LoaderRef] = {}
    seed: int = 0
    randomness: Literal["element", "exact"] = "element"
    remainder: Literal["pad", "drop"] = "pad"
    start: str | int | float = "auto"
    reuse: bool = False
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}  # environment variable -> "conn:taas/<project>/<name>" or "var:taas/<project>/<name>"
    requirements: tuple[str, ...] = ()
    other_ranks: Literal["refuse", "scratch"] = "refuse"
    cache_gb: float = 64.0
    allow_pickle: bool = False
    max_restarts: int = 0
    timeout_s: int = 86400
    max_cost: float | None = None
