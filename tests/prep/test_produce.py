from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taas_tasks.prep.elements import element_seeded
from taas_tasks.store.memory import MemoryStore
from tests.prep import cases, oracle

KINDS = {**cases.MAP_LOADERS, **cases.ITERABLE_LOADERS}
SLOW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(
    kind=st.sampled_from(sorted(KINDS)),
    size=st.integers(1, 70),
    units=st.integers(1, 150),
    machines=st.integers(1, 4),
    seed=st.integers(0, 2**40),
    first=st.sampled_from([1, 4, 8, 32]),
)
def test_the_committed_stream_is_the_one_torch_yields_in_one_process(
    kind: str, size: int, units: int, machines: int, seed: int, first: int
) -> None:
    store = MemoryStore()

    def make():
        return KINDS[kind](size)

    plan = cases.plan_of(
        store, make, units=units, machines=machines, seed=seed, sizes={"first": first, "largest": max(first, 64)}
    )
    for machine in range(cases.loader_plan_of(plan).machines):
        cases.prepare(store, make, plan, machine=machine)
    stored = oracle.committed_stream(store, cases.RUN, "data")
    oracle.assert_same_stream(stored.stream, oracle.local_stream(make(), seed=seed, units=units))
    oracle.assert_padding(stored)
