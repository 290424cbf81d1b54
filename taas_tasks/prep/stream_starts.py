"""What a loader's workers are given besides the dataset: epochs' starts, base seeds, and the rows that they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from taas.errors import LoaderError
from taas_tasks.layout import RunKeys
from taas_tasks.prep.elements import set_epoch
from taas_tasks.prep.order import Order, RecipeOrder, index_sampler
from taas_tasks.prep.order_chunks import ChunkOrder
from taas_tasks.prep.seeding import seed_start
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LoaderPlan


class Starts(Protocol):
    """Brings a loader to where ``iter(loader)`` starts its workers in an epoch, as a script's loop over epochs does."""

    def begin(self, epoch: int) -> int:
        """Call ``set_epoch`` as the script does up to this epoch; return the base seed of the workers started in it."""

    def row(self, epoch: int, index: int) -> Any:
        """Return what the sampler yields for an element of an epoch."""


def starts_of(
    loader: DataLoader[Any],
    plan: LoaderPlan,
    *,
    store: ObjectStore,
    run: str,
    seed: int,
    write_again: Callable[[], None] | None = None,
) -> Starts:
    """Return the starts of a loader whose workers are its streams. Seeds this process's generators for an iterable."""
    inspection = plan.inspection
    if inspection.order == "sequential":
        return IterableStarts(loader, seed=seed)
    if inspection.order == "recipe":
        order = RecipeOrder(loader, seed=seed)
        return MapStarts(loader, order, name=plan.loader, recipe=order)
    chunks = ChunkOrder(
        store,
        RunKeys(run),
        name=plan.loader,
        chunk_elements=inspection.order_chunk_elements,
        write_again=write_again,
    )
    return MapStarts(loader, chunks, name=plan.loader, base_seeds=inspection.base_seeds)


class IterableStarts:
    """Of an iterable: seeds are drawn from the loader's generator, or from the global one, epoch after epoch."""

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        seed_start(seed)
        self._loader = loader
        self._base_seeds: list[int] = []
        self._next = 0
        self._row = next(iter(index_sampler(loader)))

    def begin(self, epoch: int) -> int:
        """See ``Starts``."""
        for passed in range(self._next, epoch + 1):
            set_epoch(self._loader, passed)
            if passed == 0 or not self._loader.persistent_workers:
                drawn = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
                self._base_seeds.append(int(drawn.item()))
        self._next = max(self._next, epoch + 1)
        return self._base_seeds[min(epoch, len(self._base_seeds) - 1)]

    def row(self, epoch: int, index: int) -> Any:
        """See ``Starts``: as many nothings as an element has samples."""
        return self._row


class MapStarts:
    """Of a map-style loader: rows and seeds come from its recipe, or from what was written when it was inspected."""

    def __init__(
        self,
        loader: DataLoader[Any],
        order: Order,
        *,
        name: str,
        recipe: RecipeOrder | None = None,
        base_seeds: Sequence[int] = (),
    ) -> None:
        self._loader = loader
        self._order = order
        self._name = name
        self._recipe = recipe
        self._base_seeds = base_seeds
        self._next = 0

    def begin(self, epoch: int) -> int:
        """See ``Starts``."""
        for passed in range(min(self._next, epoch), epoch + 1):
            set_epoch(self._loader, passed)
        self._next = max(self._next, epoch + 1)
        if self._recipe is not None:
            return self._recipe.base_seed(epoch)
        return self._base_seeds[min(epoch, len(self._base_seeds) - 1)]

    def row(self, epoch: int, index: int) -> Any:
        """See ``Starts``.

        Raises:
            LoaderError: The epoch has fewer elements than when the loader was inspected.
        """
        rows = self._order.rows(epoch, index, index + 1)
        if not rows:
            raise LoaderError(
                f"loader {self._name!r}: its sampler gives no more than {index} elements in epoch {epoch}, more were"
                " found when it was inspected; its dataset must have the same length everywhere"
            )
        return rows[0]
