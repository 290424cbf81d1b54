from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from taas_tasks.store.memory import MemoryStore
from tests.prep import cases, oracle, stream_cases

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more loader workers than cores
SEED = 3
UNITS = {"more workers than elements": 7, "fewer elements than workers": 7}  # many short epochs
SMALL = {"first": 2, "largest": 4}


def assert_local(store: MemoryStore, make: stream_cases.Make, *, units: int) -> list[oracle.Item]:
    stored = oracle.committed_stream(store, cases.RUN, "data")
    oracle.assert_same_stream(stored.stream, oracle.local_stream(make(), seed=SEED, units=units))
    return stored.stream


@pytest.mark.parametrize(("place", "kind"), list(enumerate(stream_cases.ITERABLES)))
def test_machines_that_share_the_workers_of_an_iterable_commit_bitwise_the_local_stream(place: int, kind: str) -> None:
    make, store = stream_cases.ITERABLES[kind], MemoryStore()
    units, machines = UNITS.get(kind, 33), 1 + place % 4
    plan = cases.plan_of(
        store, make, units=units, machines=machines, seed=SEED, sizes=SMALL, has_position="state" in kind
    )
    assert cases.loader_plan_of(plan).is_merged
    stream_cases.prepare_in_turns(store, make, plan)
    stream = assert_local(store, make, units=units)
    assert kind == "infinite" or stream[-1].epoch >= 1


@pytest.mark.parametrize(("place", "kind"), list(enumerate(stream_cases.EXACT)))
def test_machines_that_share_the_workers_of_an_exact_loader_commit_bitwise_the_local_stream(
    place: int, kind: str
) -> None:
    make, store = stream_cases.EXACT[kind], MemoryStore()
    units, machines = UNITS.get(kind, 23), 1 + (place + 1) % 4
    plan = cases.plan_of(store, make, units=units, machines=machines, seed=SEED, sizes=SMALL, randomness="exact")
    assert cases.loader_plan_of(plan).is_merged
    stream_cases.prepare_in_turns(store, make, plan)
    assert_local(store, make, units=units)
