"""What a run offers to the user's code in one rank: ``taas.loader`` and ``taas.log``."""

from __future__ import annotations

import json
import logging
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import taas.context
from taas.errors import DeliveryError, LoaderError, ObjectMissing
from taas_tasks.delivery import progress
from taas_tasks.delivery.loader import DeliveredLoader, Delivery
from taas_tasks.values import LaunchPlan, Value

_log = logging.getLogger("taas")


class RankContext(Value):
    """The context file that the node agent writes for each rank."""

    rank: int
    local_rank: int
    world_size: int
    feeder_socket: str | None
    launch_plan_path: str
    counters_dir: str
    metrics_path: str
    project_dir: str
    payloads_dir: str | None = None  # plain loaders' payloads, one file per sha256; beside the counters by default


@dataclass(frozen=True)
class _PlainSource:
    source: str | None = None
    payload: str | None = None
    sha256: str | None = None


class _Payloads:
    """The payloads that the node agent has downloaded, as far as ``open_loader`` needs a store."""

    def __init__(self, folder: Path, keys: dict[str, str]) -> None:
        self._folder = folder
        self._keys = keys

    def get(self, key: str) -> bytes:
        try:
            return (self._folder / self._keys[key]).read_bytes()
        except FileNotFoundError as error:
            raise ObjectMissing(
                f"the node agent has not brought the payload {key} to {self._folder}", key=key
            ) from error


class RankProvider:
    """The provider of one rank; implements ``taas.context.Provider``."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._plan = LaunchPlan.model_validate_json(Path(context.launch_plan_path).read_bytes())
        self._loaders: dict[str, DataLoader[Any]] = {}

    @property
    def project_dir(self) -> Path:
        """The project folder of this rank."""
        return Path(self._context.project_dir)

    @property
    def rank(self) -> int:
        """The global rank."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._context.world_size

    @property
    def is_rank0(self) -> bool:
        """Whether this is global rank 0."""
        return self._context.rank == 0

    def loader_names(self) -> list[str]:
        """Return the names of the run's loaders."""
        return sorted({*self._plan.loaders, *self._plan.plain_loaders, *self._plan.plain_payloads})

    def loader(self, name: str) -> DataLoader[Any]:
        """Return the loader of this name; the same object each time.

        Raises:
            KeyError: the run has no such loader.
            LoaderError: a plain one cannot be opened.
        """
        if name not in self._loaders:
            self._loaders[name] = self._delivered(name) if name in self._plan.loaders else self._plain(name)
        return self._loaders[name]

    def progressed(self) -> None:
        """Count that the script goes on."""
        progress.note()

    def log(self, metrics: dict[str, Any]) -> None:
        """Append metrics to the run's, as one JSON line."""
        line = json.dumps({"time": time.time(), **metrics}, default=_as_number)
        with Path(self._context.metrics_path).open("a") as file:
            file.write(line + "\n")

    def _delivered(self, name: str) -> DataLoader[Any]:
        context, plan = self._context, self._plan
        if context.feeder_socket is None:
            raise DeliveryError(f"loader '{name}' is to be delivered, but this host has no feeder; see the agent's log")
        delivery = Delivery(
            rank=context.rank,
            world_size=context.world_size,
            feeder_socket=context.feeder_socket,
            counters_dir=Path(context.counters_dir),
            remainder=plan.remainder,
            allow_pickle=plan.allow_pickle,
        )
        return DeliveredLoader(plan.loaders[name], delivery)

    def _plain(self, name: str) -> DataLoader[Any]:
        from taas_tasks.prep.opening import open_loader

        payload = self._plan.plain_payloads.get(name)
        source = _PlainSource(self._plan.plain_loaders[name]) if payload is None else _PlainSource(None, *payload)
        keys = dict(self._plan.plain_payloads.values())
        folder = Path(self._context.payloads_dir or Path(self._context.counters_dir).parent / "payloads")
        try:
            return open_loader(source, self.project_dir, _Payloads(folder, keys), is_to_be_prepared=False)  # type: ignore[arg-type]
        except LoaderError:
            _log.exception("loader '%s' cannot be opened", name)
            raise


def _as_number(value: Any) -> Any:
    """Return a tensor's or array's value where it is one number, else its text."""
    item = getattr(value, "item", None)
    try:
        return item() if item is not None else str(value)
    except (RuntimeError, ValueError):
        return str(value)


# What Lightning says of every loader without worker processes, or with a length and an iterable dataset.
_MISLEADING = (r"Your `IterableDataset` has `__len__` defined", r"The '.*_dataloader' does not have many workers")


def install(context_path: Path) -> RankProvider:
    """Read the context file and install this rank's provider."""
    for message in _MISLEADING:
        warnings.filterwarnings("ignore", message=message)
    provider = RankProvider(RankContext.model_validate_json(context_path.read_bytes()))
    taas.context.install(provider)
    return provider
