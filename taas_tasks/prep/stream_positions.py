"""How a loader worker reads on behind an element of its stream: the states of the dataset and of the generators.

A position is kept as ``torch.save`` writes it and read with ``weights_only=True``: reading one runs no code. So a
``state_dict`` may hold tensors, numbers, strings, bytes, and dicts, lists and tuples of them.
"""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import torch


def has_state(part: Any) -> bool:
    """Return whether a dataset or an iterator can tell and take its state."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def position_behind(fetcher: Any) -> bytes | None:
    """Return the position behind what a fetcher of iterables gave last; None where the dataset can tell none.

    Args:
        fetcher: torch's ``_IterableDatasetFetcher``: its dataset and the iterator over it are asked.
    """
    parts = {"dataset": fetcher.dataset, "iterator": fetcher.dataset_iter}
    states = {name: part.state_dict() for name, part in parts.items() if has_state(part)}
    if not states:
        return None
    kept = io.BytesIO()
    torch.save({"states": states, "is_ended": fetcher.ended, "generators": _generators()}, kept)
    return kept.getvalue()


class Position:
    """A position that ``position_behind`` gave, to be put into a fresh loader worker: dataset first, then iterator.

    Raises:
        pickle.UnpicklingError: It holds something that cannot be read without running code.
    """

    def __init__(self, data: bytes) -> None:
        self._kept: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)

    def load_dataset(self, dataset: Any) -> None:
        """Put the dataset's state in; before it is iterated."""
        if "dataset" in self._kept["states"]:
            dataset.load_state_dict(self._kept["states"]["dataset"])

    def load_fetcher(self, fetcher: Any) -> None:
        """Put the iterator's state in, and the generators' last."""
        if "iterator" in self._kept["states"]:
            fetcher.dataset_iter.load_state_dict(self._kept["states"]["iterator"])
        fetcher.ended = self._kept["is_ended"]
        _set_generators(self._kept["generators"])


def _generators() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    as_tensor = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {"random": random.getstate(), "numpy": (name, as_tensor, *rest), "torch": torch.get_rng_state()}


def _set_generators(states: dict[str, Any]) -> None:
    version, internal, gauss = states["random"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
