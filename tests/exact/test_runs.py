"""What a run can ask for beside the kind of loader: a named case of each promise, and a list that must be whole."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from taas.errors import RequestError
from taas.flavors import FLAVORS
from taas.request import LoaderRef
from taas_tasks import project
from taas_tasks.layout import RunKeys
from taas_tasks.plan import make_plan
from taas_tasks.store import open_store
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import Inspection
from tests.delivery.processes import PREAMBLE, feeder_process, said, start_ranks, stopped_at_the_end
from tests.exact import harness
from tests.exact.harness import NAME, RUN, RUN_ID, Scenario
from tests.exact.loaders import PROMISED_RUNS
from tests.exact.machines import running_machines
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
FOLDER = Path(__file__).parent
CASES = {
    "classes of __main__": "test_runs.py::test_classes_and_lambdas_of_main_come_through_a_payload",
    "element": "test_kinds.py::test_a_map_style_loader_comes_through_by_index",
    "exact": "test_kinds.py::test_a_loader_without_loader_workers_comes_through_exactly",
    "several loaders with their own units": "test_runs.py::test_two_loaders_with_units_of_their_own_are_read_in_turn",
    "several epochs": "test_kinds.py::test_an_iterable_comes_through",
    "remainder pad": "test_runs.py::test_fewer_elements_than_ranks_are_padded_or_refused",
    "remainder drop": "test_runs.py::test_fewer_elements_than_ranks_are_padded_or_refused",
    "replays": "test_runs.py::test_epochs_are_replayed_in_order",
    "more machines than loader workers": "test_runs.py::test_more_machines_than_loader_workers_are_not_taken",
    "fewer elements than ranks": "test_runs.py::test_fewer_elements_than_ranks_are_padded_or_refused",
    "kills and retries": "test_machines.py::test_ranks_that_read_while_machines_are_killed_receive_the_local_stream",
    "delivered while prepared": "test_properties.py::test_ranks_that_read_while_machines_prepare_receive_the_same",
}


def test_every_run_that_is_promised_has_a_case() -> None:
    assert set(CASES) == set(PROMISED_RUNS)
    for case in CASES.values():
        file, _, name = case.partition("::")
        assert f"def {name}(" in (FOLDER / file).read_text()


def test_two_loaders_with_units_of_their_own_are_read_in_turn(tmp_path: Path) -> None:
    train = Scenario("shuffled", size=21, units=37, machines=2, name="train", nproc=4)
    check = Scenario("blocks", size=13, units=15, machines=2, workers=2, name="check", nproc=4)
    store = MemoryStore()
    plan = harness.planned(store, train, check)
    for one in (train, check):
        harness.prepare(store, one, plan)
    epochs = {one.name: harness.local_epochs(one) for one in (train, check)}
    assert {name: sum(map(len, found)) for name, found in epochs.items()} == {"train": 37, "check": 15}
    with harness.all_ranks(store, harness.launched(plan), tmp_path, name="train") as ranks:
        both = {
            "train": ranks,
            "check": harness.Ranks(ranks.hosts, [ranks.hosts[0].loader(r, "check") for r in range(4)]),
        }
        for number in range(4):
            for one in (train, check):
                found = epochs[one.name]
                harness.assert_pass(both[one.name].one_pass(), found[number % len(found)], one)
        for one in (train, check):
            numbers = [number % len(epochs[one.name]) for number in range(4)]
            harness.assert_books(store, one, plan.loaders[one.name], ranks, epochs[one.name], numbers)


@pytest.mark.parametrize("nnodes", [1, 4])
@pytest.mark.parametrize(("kind", "workers"), [("in order", 0), ("shared, without batches", 2)])
def test_fewer_elements_than_ranks_are_padded_or_refused(kind: str, workers: int, nnodes: int, tmp_path: Path) -> None:
    scenario = Scenario(kind, size=3, workers=workers, units=3, nnodes=nnodes, nproc=8)
    account = harness.check(scenario, tmp_path)
    epochs = harness.local_epochs(scenario)
    assert account.padded == sum(-len(epoch) % scenario.world_size for epoch in epochs)
    with pytest.raises(RequestError, match=r"fewer than the .* ranks, and remainder \"drop\" leaves no step"):
        harness.planned(MemoryStore(), Scenario(kind, size=3, workers=workers, units=3, nproc=8, remainder="drop"))


def test_epochs_are_replayed_in_order(tmp_path: Path) -> None:
    account = harness.check(Scenario("random values", size=30, units=25, replays=4, nproc=2), tmp_path)
    assert account.replayed == 10 + 10 + 6 + 10  # epochs of 10, 10 and 5 elements, by twos
    assert any("replayed in order" in note for note in account.notes)


def test_more_machines_than_loader_workers_are_not_taken(tmp_path: Path) -> None:
    scenario = Scenario("blocks", size=40, workers=2, units=60, machines=8)
    store = MemoryStore()
    plan = harness.planned(store, scenario)
    assert plan.loaders[NAME].machines == 2
    assert any("2 of the 8 machines asked for can share it" in warning for warning in plan.warnings)
    harness.prepare(store, scenario, plan)
    harness.check_delivery(store, scenario, plan, tmp_path, epochs=harness.local_epochs(scenario))


NOTEBOOK = """
from dataclasses import dataclass
from typing import Any, NamedTuple
import sys, torch
from torch.utils.data import DataLoader, Dataset
class Point(NamedTuple):
    x: Any
    y: Any
@dataclass
class Item:
    point: Point
    name: str
class Items(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return Item(Point(torch.tensor([index]), index / 2), transform(index))
transform = lambda index: f"item {index}"
data = DataLoader(Items(), batch_size=2, shuffle=True, num_workers=2, collate_fn=lambda rows: rows)
"""
REGISTERS = (
    NOTEBOOK
    + """
import taas
from taas.pickling import pickled
assert taas.register(data) == "data"
sys.stdout.buffer.write(pickled(data, name="data"))
"""
)
TRAINS = (
    PREAMBLE
    + NOTEBOOK
    + """
from tests.prep.oracle import equal, local_stream
received = [taas.loader("data"), taas.loader("data")]
received = [element for loader in received for element in loader]
wanted = [item.element for item in local_stream(data, seed=7, units=9)]
say([len(received), all(equal(*pair) for pair in zip(received, wanted, strict=True)), type(received[0][0]) is Item])
"""
)


@pytest.mark.store
def test_classes_and_lambdas_of_main_come_through_a_payload(s3_server: S3Server, tmp_path: Path) -> None:
    """A script run as ``__main__`` registers; machines that know none of its classes prepare; ranks run it again."""
    config = s3_server.fresh_config()
    store, keys = open_store(config), RunKeys(RUN)
    payload = subprocess.run([sys.executable, "-c", REGISTERS], capture_output=True, timeout=90, check=True).stdout
    ref = LoaderRef(payload="payloads/one", sha256=hashlib.sha256(payload).hexdigest())
    store.put("payloads/one", payload)
    scenario = Scenario("in order", units=9, nproc=1, machines=2, seed=7, largest=4)
    project.commit(store, "demo", {"note.txt": b"a project without code"}, author="ada")
    snapshot = project.head(store, "demo")[1]
    common = {"store": config.model_dump(), "run": RUN, "run_id": RUN_ID, "project": "demo", "snapshot": snapshot}
    common |= {"generation": 1, "host": "c1", "host_root": "", "loader": NAME}
    with running_machines() as machines:
        given = common | ref.model_dump() | {"seed": 7, "randomness": "element", "units": 9}
        assert machines.wait(machines.start("inspect", given, tmp_path / "inspect")) == 0
        inspection = Inspection.model_validate_json(store.get(keys.inspection(NAME)))
        plan = harness.sized(make_plan(harness.pinned(scenario, ref=ref), {NAME: inspection}, FLAVORS), scenario)
        store.put(keys.plan, plan.to_bytes())
        tries = [
            machines.start("prepare", common | {"plan": keys.plan, "machine": machine}, tmp_path / f"m{machine}")
            for machine in range(2)
        ]
        assert [machines.wait(one) for one in tries] == [0, 0]
    with feeder_process(config, harness.launched(plan), tmp_path) as (host, _):
        ranks = start_ranks(host, TRAINS, count=1)
        with stopped_at_the_end(ranks):
            assert said(ranks[0]) == [[9, True, True]]
