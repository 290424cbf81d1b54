from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from taas_tasks.prep.stream_positions import Position, position_behind


class Holds:
    """A dataset with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@dataclass
class Fetcher:
    """What torch's fetcher shows."""

    dataset: Any
    dataset_iter: Any
    ended: bool = False


def test_states_and_generators_are_as_they_were() -> None:
    state = {"at": 3, "rows": [1, 2.5, "x", b"y", None], "t": torch.arange(3)}
    random.gauss(0, 1)
    position = position_behind(Fetcher(Holds(state), Holds({"i": 1}), ended=True))
    assert position is not None
    wanted = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]
    into = Fetcher(Holds(None), Holds(None))
    kept = Position(position)
    kept.load_dataset(into.dataset)
    kept.load_fetcher(into)
    assert [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()] == wanted
    assert torch.equal(into.dataset.state.pop("t"), state.pop("t"))
    assert (into.dataset.state, into.dataset_iter.state, into.ended) == (state, {"i": 1}, True)


def test_without_a_state_there_is_no_position() -> None:
    assert position_behind(Fetcher([1], iter([1]))) is None


class RunsCode:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code was run')",)


def test_a_position_that_would_run_code_is_refused() -> None:
    position = position_behind(Fetcher(Holds({"bad": RunsCode()}), None))
    assert position is not None
    with pytest.raises(pickle.UnpicklingError):
        Position(position)
