from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from taas_tasks.store.memory import MemoryStore
from tests.prep import cases, oracle


def prepared(make: Callable[[], DataLoader[Any]], *, units: int, machines: int = 1, **more: Any) -> MemoryStore:
    """Prepare with machines that run in turns where that can be, else at once."""
    store = MemoryStore()
    plan = cases.plan_of(store, make, units=units, machines=machines, seed=3, **more)
    cases.prepare(store, make, plan)
    return store


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_x(batch_size: int | None, persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        numbers = cases.Numbers(40, draws=True)
        return DataLoader(numbers, batch_size=batch_size, num_workers=2, persistent_workers=persistent)

    store = prepared(make, units=60, sizes={"first": 8, "largest": 16})
    stored = oracle.committed_stream(store, cases.RUN, "data")
    oracle.assert_same_stream(stored.stream, oracle.local_stream(make(), seed=3, units=60))
