"""What ``taas.loader`` and ``taas.log`` mean here: the seam by which a run gives them its own meaning.

Inside a run the bootstrap of each rank calls ``install`` before the user's script starts. Outside, ``taas.loader``
gives the registered loader as it is, and ``taas.log`` writes a line to the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from taas.errors import DeliveryError, RegisterError
from taas.registry import registered

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_log = logging.getLogger("taas")


@runtime_checkable
class Provider(Protocol):
    """What a run offers to the user's code in one rank."""

    @property
    def project_dir(self) -> Path:
        """The project folder of this rank."""

    @property
    def rank(self) -> int:
        """The global rank."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def is_rank0(self) -> bool:
        """Whether this is global rank 0, whose files and metrics are kept."""

    def loader(self, name: str) -> DataLoader[Any]:
        """Return the loader of this name, one of ``loader_names``; the same object each time."""

    def loader_names(self) -> list[str]:
        """Return the names of the run's loaders."""

    def log(self, metrics: dict[str, Any]) -> None:
        """Keep metrics; called on rank 0 only."""

    def progressed(self) -> None:
        """Take notice that the script goes on: a gang in which nothing does is taken for one that hangs."""


_provider: Provider | None = None


def install(provider: Provider) -> None:
    """Give ``taas.loader`` and ``taas.log`` the meaning that they have inside a run.

    Raises:
        DeliveryError: another provider is installed: a process belongs to one run.
    """
    global _provider
    if _provider is not None and _provider is not provider:
        raise DeliveryError("this process already belongs to a run; a rank is set up once")
    _provider = provider


def uninstall() -> None:
    """Take back what ``install`` did; nothing happens when there is nothing."""
    global _provider
    _provider = None


def current() -> Provider | None:
    """Return the run that this process belongs to, or None outside a run."""
    return _provider


def loader(name: str) -> DataLoader[Any]:
    """Return a loader by name: the delivered one inside a run, the registered one, as it is, outside.

    Raises:
        DeliveryError: inside a run, when the run has no loader of this name.
        RegisterError: outside, when none is registered under this name.
    """
    if _provider is not None:
        return _delivered(_provider, name)
    known = registered()
    if name not in known:
        listed = ", ".join(known) or "none"
        raise RegisterError(
            f"Dataloader {name} is not registered; registered here: {listed}. Outside a run, "
            f"taas.register({name if name.isidentifier() else 'loader'}) comes first",
            loader=name,
        )
    plain: DataLoader[Any] = known[name].loader
    return plain


def _delivered(provider: Provider, name: str) -> DataLoader[Any]:
    names = provider.loader_names()
    if name not in names:
        listed = ", ".join(names) or "none"
        message = f"this run has no loader '{name}'; it has: {listed}. Name it in the request's 'loaders'"
        raise DeliveryError(message, loader=name)
    return provider.loader(name)


def log(metrics: Mapping[str, Any] | None = None, /, **named: Any) -> None:
    """Keep metrics of the training: ``taas.log(loss=0.3, step=100)``.

    Inside a run those of rank 0 come with the report and other ranks' are passed over; outside they are a log line.
    """
    values = {**(metrics or {}), **named}
    if _provider is None:
        _log.info("metrics %s", ", ".join(f"{name}={value}" for name, value in values.items()))
        return
    _provider.progressed()
    if _provider.is_rank0:
        _provider.log(values)
