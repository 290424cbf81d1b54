"""Any loader, any number of machines, hosts and ranks, any try that dies: what ranks receive is what torch yields here.

As many cases as ``TAAS_EXACT_CASES`` says (``make test-exact`` runs thousands).
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from taas.errors import RequestError
from taas_tasks.store.memory import MemoryStore
from tests.exact import harness
from tests.exact.harness import Scenario
from tests.exact.loaders import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
NUM_CASES = int(os.environ.get("TAAS_EXACT_CASES", "25"))
TIMEOUT_S = 300 + 30 * NUM_CASES
PROFILE = settings(
    deadline=None,
    max_examples=NUM_CASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    database=None,
    print_blob=True,
)
NUM_WORKERS = {"map by index": (0, 0, 0, 2), "exact": (0, 1, 2, 3), "iterable": (0, 1, 2, 3, 5)}


@st.composite
def scenarios(draw: Any, *, has_workers: bool = True) -> Scenario:
    """Any scenario that can be asked for; epochs are no shorter than a sixth of the units, so that they stay few."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    randomness = draw(st.sampled_from(["element", "exact"]))
    reading = "iterable" if KINDS[kind].is_iterable else "exact" if randomness == "exact" else "map by index"
    units = draw(st.integers(1, 80))
    machines = draw(st.integers(1, 8))
    first = draw(st.sampled_from([1, 2, 4, 8, 32]))
    return Scenario(
        kind,
        size=draw(st.integers(max(1, units // 6), 40)),
        workers=draw(st.sampled_from(NUM_WORKERS[reading])) if has_workers else 0,
        units=units,
        machines=machines,
        nnodes=draw(st.sampled_from([1, 2, 4])),
        nproc=draw(st.sampled_from([1, 2, 4, 8])),
        remainder=draw(st.sampled_from(["pad", "drop"])),
        randomness=randomness,
        seed=draw(st.integers(0, 2**40)),
        first=first,
        largest=max(first, draw(st.sampled_from([1, 4, 16, 32]))),
        kills=tuple(draw(st.lists(st.tuples(st.integers(0, machines - 1), st.integers(0, 9)), max_size=4))),
        replays=draw(st.integers(0, 2)),
    )


def run(scenario: Scenario, *, meanwhile: bool) -> None:
    store = MemoryStore()
    try:
        plan = harness.planned(store, scenario)
    except RequestError as error:  # "drop" that leaves no step is refused before anything is taken
        assert scenario.remainder == "drop" and "leaves no step" in error.message
        assert len(harness.local_epochs(scenario)[0]) < scenario.world_size
        event("refused")
        return
    event(f"read by {plan.loaders[harness.NAME].inspection.read_by}, {scenario.randomness}")
    epochs = harness.local_epochs(scenario)
    with tempfile.TemporaryDirectory() as folder:
        if not meanwhile:
            harness.prepare(store, scenario, plan)
            harness.check_delivery(store, scenario, plan, Path(folder), epochs=epochs)
            return
        failed: list[BaseException] = []

        def read() -> None:
            try:
                harness.check_delivery(store, scenario, plan, Path(folder), epochs=epochs)
            except BaseException as error:  # noqa: BLE001 (told by the test's own thread)
                failed.append(error)

        reading = threading.Thread(target=read)
        reading.start()
        harness.prepare(store, scenario, plan)
        reading.join(180)
        assert not reading.is_alive()
        if failed:
            raise failed[0]


@pytest.mark.timeout(TIMEOUT_S)
@PROFILE
@given(scenario=scenarios())
def test_what_ranks_receive_is_what_torch_yields_in_one_process(scenario: Scenario) -> None:
    run(scenario, meanwhile=False)


@pytest.mark.timeout(TIMEOUT_S)
@settings(PROFILE, max_examples=max(1, NUM_CASES // 4))
@given(scenario=scenarios(has_workers=False))
def test_ranks_that_read_while_machines_prepare_receive_the_same(scenario: Scenario) -> None:
    run(scenario, meanwhile=True)
