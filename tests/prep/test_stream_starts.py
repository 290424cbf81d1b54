from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from taas.errors import LoaderError
from taas_tasks.prep.order import RecipeOrder
from taas_tasks.prep.stream_starts import IterableStarts, MapStarts
from tests.prep import cases


class NotesEpochs(cases.Numbers):
    """Notes the calls of set_epoch; each draws a random number, as any code of the user's may."""

    def __init__(self) -> None:
        super().__init__(3)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)
        torch.rand(())


def seeds_of_torch(loader: DataLoader[Any], epochs: int) -> list[int]:
    torch.manual_seed(4)
    found = []
    for epoch in range(epochs):
        loader.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        one: Any = iter(loader)
        found.append(one._base_seed)
        list(one)
    return found


@pytest.mark.parametrize("more", [{}, {"persistent_workers": True}, {"generator": True}])
def test_an_iterable_is_seeded_and_told_its_epochs_as_by_a_script(more: dict[str, Any]) -> None:
    def make() -> DataLoader[Any]:
        given = more | ({"generator": cases.generator(1)} if "generator" in more else {})
        return DataLoader(NotesEpochs(), num_workers=1, **given)

    wanted = seeds_of_torch(make(), 4)
    loader = make()
    starts = IterableStarts(loader, seed=4)
    assert [starts.begin(epoch) for epoch in (2, 2, 3)] == [wanted[2], wanted[2], wanted[3]]
    assert loader.dataset.epochs == [0, 1, 2, 3]  # type: ignore[attr-defined]


def test_an_iterables_row_has_as_many_places_as_an_element_has_samples() -> None:
    assert IterableStarts(DataLoader(NotesEpochs(), batch_size=3, num_workers=1), seed=0).row(0, 5) == [None] * 3
    assert IterableStarts(DataLoader(NotesEpochs(), batch_size=None, num_workers=1), seed=0).row(0, 5) is None


class Epochs(cases.ByEpoch):
    """Notes the calls of set_epoch."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_a_map_style_loader_goes_back_to_an_epoch_that_another_stream_is_still_in() -> None:
    loader = DataLoader(Epochs(5), batch_size=2, num_workers=2)
    recipe = RecipeOrder(loader, seed=0)
    starts = MapStarts(loader, recipe, name="data", recipe=recipe)
    seeds = [starts.begin(epoch) for epoch in (2, 1, 2, 3)]
    assert loader.dataset.epochs == [0, 1, 2, 1, 2, 3]  # type: ignore[attr-defined]
    assert seeds == [recipe.base_seed(epoch) for epoch in (2, 1, 2, 3)]
    assert starts.row(1, 2) == [4]


def test_a_row_that_the_sampler_does_not_have_here_is_an_error() -> None:
    loader = DataLoader(Epochs(5), batch_size=2, num_workers=2)
    with pytest.raises(LoaderError, match="its sampler gives no more than 3 elements in epoch 0"):
        MapStarts(loader, RecipeOrder(loader, seed=0), name="data").row(0, 3)
