"""Resuming in the middle of an epoch, at the same or another world size, proven from the elements that arrive."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import LaunchPlan, Plan
from tests.exact import harness
from tests.exact.harness import Scenario
from tests.exact.test_properties import NUM_CASES
from tests.prep.oracle import equal

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
HOSTS = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 4), (2, 8), (4, 2)]
LOADERS = [
    Scenario("shuffled", size=70, units=80),
    Scenario("epochs that differ", size=30, units=70),
    Scenario("unaware of workers", size=90, units=60),
    Scenario("blocks", size=46, units=100, workers=3, machines=2),
    Scenario("random values", size=60, units=45, workers=2, randomness="exact"),
]


@pytest.fixture(scope="module")
def prepared() -> list[tuple[MemoryStore, Plan, list[list[Any]]]]:
    """Each loader's store, plan and local epochs."""
    found = []
    for scenario in LOADERS:
        store = MemoryStore()
        plan = harness.planned(store, scenario)
        harness.prepare(store, scenario, plan)
        found.append((store, plan, harness.local_epochs(scenario)))
    return found


def launch(plan: Plan, scenario: Scenario, *, generation: int) -> LaunchPlan:
    changes = {"nnodes": scenario.nnodes, "nproc_per_node": scenario.nproc, "remainder": scenario.remainder}
    return harness.launched(plan, generation=generation).model_copy(update=changes)


def is_known(plan: Plan) -> bool:
    """Whether the lengths of epochs are known beforehand."""
    inspection = plan.loaders[harness.NAME].inspection
    return inspection.epoch_length is not None or bool(inspection.epoch_lengths)


@settings(
    deadline=None, max_examples=max(20, NUM_CASES // 2), database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data())
def test_a_resumed_training_sees_what_was_left_and_then_whole_epochs(
    data: Any, prepared: list[tuple[MemoryStore, Plan, list[list[Any]]]]
) -> None:
    which = data.draw(st.integers(0, len(LOADERS) - 1))
    store, plan, epochs = prepared[which]
    remainder = data.draw(st.sampled_from(["pad", "drop"]))
    before, after = (
        dataclasses.replace(LOADERS[which], nnodes=nnodes, nproc=nproc, remainder=remainder)
        for nnodes, nproc in (data.draw(st.sampled_from(HOSTS)), data.draw(st.sampled_from(HOSTS)))
    )
    at = data.draw(st.integers(0, len(epochs) - 1))
    epoch = epochs[at]
    steps = data.draw(st.integers(0, harness.steps_of(len(epoch), before)))
    has_ended = 0 < steps == harness.steps_of(len(epoch), before)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with harness.all_ranks(store, launch(plan, before, generation=1), folder / "1") as ranks:
            for number in range(at):
                harness.assert_pass(ranks.one_pass(), epochs[number], before)
            seen = ranks.one_pass(limit=steps) if steps else []
            (state,) = {json.dumps(loader.state_dict()) for loader in ranks.loaders}  # every rank says the same
        with harness.all_ranks(store, launch(plan, after, generation=2), folder / "2") as ranks:
            for loader in ranks.loaders:
                loader.load_state_dict(json.loads(state))
            offset = steps * before.world_size
            left = harness.steps_of(len(epoch), after, offset=offset)
            if not has_ended and not left and not is_known(plan):
                assert not any(ranks.one_pass())  # only reading shows that nothing is left
            if not has_ended and left:
                assert {len(loader) for loader in ranks.loaders} == ({steps + left})
                rest = ranks.one_pass()
                harness.assert_pass(rest, epoch, after, offset=offset, where=f"{before} then {after}")
                assert_once(seen, rest, epoch, after)
            for number in range(at + 1, len(epochs)):
                if harness.steps_of(len(epochs[number]), after):
                    harness.assert_pass(ranks.one_pass(), epochs[number], after, where="an epoch after the resume")


def assert_once(seen: list[list[Any]], rest: list[list[Any]], epoch: list[Any], after: Scenario) -> None:
    """Check that the two parts of an epoch are the whole, in its order, but for the rule about the remainder."""
    both = [row for part in (seen, rest) for step in zip(*part, strict=True) for row in step]
    whole = len(epoch) if after.remainder == "pad" else len(both)
    assert len(both) - whole < after.world_size and whole > len(epoch) - after.world_size
    assert all(equal(*pair) for pair in zip(both[:whole], epoch[:whole], strict=True))
