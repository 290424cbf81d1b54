"""Distributed training as a service: what a notebook or a script of a project uses.

``register`` a DataLoader, ``submit`` a request and follow the ``Run`` that it gives; in the script that runs,
``loader`` gives the delivered loader, ``log`` keeps metrics and ``checkpoint`` states. Importing this is light: the
rest comes on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from taas.errors import (
    ArtifactError,
    ClientError,
    DeliveryError,
    ElementError,
    HostRefused,
    HostUnreachable,
    JobFailed,
    JobLost,
    JobTimeout,
    LaunchError,
    LoaderError,
    NoCapacity,
    ObjectCorrupt,
    ObjectMissing,
    PreflightFailed,
    PrepareError,
    ProjectConflict,
    ProjectError,
    RankFailed,
    RegisterError,
    RequestError,
    RequirementsFailed,
    RunCancelled,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    StreamTaken,
    TaasError,
)

if TYPE_CHECKING:
    from taas.checkpoints import checkpoint
    from taas.context import loader, log
    from taas.registry import register, unregister, unregistered
    from taas.run import attach, runs, submit

_LAZY = {
    "checkpoint": "taas.checkpoints",
    "register": "taas.registry",
    "unregister": "taas.registry",
    "unregistered": "taas.registry",
    "loader": "taas.context",
    "log": "taas.context",
    "submit": "taas.run",
    "attach": "taas.run",
    "runs": "taas.run",
}

__all__ = [
    "ArtifactError",
    "ClientError",
    "DeliveryError",
    "ElementError",
    "HostRefused",
    "HostUnreachable",
    "JobFailed",
    "JobLost",
    "JobTimeout",
    "LaunchError",
    "LoaderError",
    "NoCapacity",
    "ObjectCorrupt",
    "ObjectMissing",
    "PreflightFailed",
    "PrepareError",
    "ProjectConflict",
    "ProjectError",
    "RankFailed",
    "RegisterError",
    "RequestError",
    "RequirementsFailed",
    "RunCancelled",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "StreamTaken",
    "TaasError",
    "attach",
    "checkpoint",
    "loader",
    "log",
    "register",
    "runs",
    "submit",
    "unregister",
    "unregistered",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'taas' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
