"""Machines as real processes on the real S3 server, killed at any point and tried again, while ranks already read."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taas.flavors import FLAVORS
from taas.request import LoaderRef
from taas_tasks import project
from taas_tasks.layout import RunKeys
from taas_tasks.plan import make_plan
from taas_tasks.store import open_store
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import Inspection, Plan, StoreConfig
from tests.exact import harness, loaders
from tests.exact.harness import NAME, RUN, RUN_ID, Scenario
from tests.exact.machines import Machines, running_machines
from tests.support.s3_server import S3Server

pytestmark = [pytest.mark.store, pytest.mark.filterwarnings("ignore:This DataLoader will create")]
KEYS = RunKeys(RUN)
FILE = "exact_data.py"
DATA = """
from tests.exact import loaders


def make():
    return loaders.make({kind!r}, {size}, {workers})
"""
NUM_CASES = int(os.environ.get("TAAS_EXACT_KILL_CASES", "4"))


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with running_machines() as running:
        yield running


class Site:
    """One run's store, project and plan, and the tries of its machines."""

    def __init__(self, machines: Machines, config: StoreConfig, scenario: Scenario, folder: Path) -> None:
        self.machines, self.config, self.scenario, self.folder = machines, config, scenario, folder
        self.store: ObjectStore = open_store(config)
        source = DATA.format(kind=scenario.kind, size=scenario.size, workers=scenario.workers)
        project.commit(self.store, "demo", {FILE: source.encode()}, author="ada")
        self.snapshot = project.head(self.store, "demo")[1]
        self.tries = dict.fromkeys(range(scenario.machines), 0)
        self.plan = self._planned()

    def input(self, **more: Any) -> dict[str, Any]:
        own = {"run": RUN, "run_id": RUN_ID, "project": "demo", "snapshot": self.snapshot, "generation": 1}
        return {"store": self.config.model_dump(), **own, "host": "c1", "host_root": "", "loader": NAME} | more

    def _planned(self) -> Plan:
        scenario = self.scenario
        asked = {"seed": scenario.seed, "randomness": scenario.randomness, "units": scenario.units}
        pid = self.machines.start("inspect", self.input(source=f"{FILE}:make", **asked), self.folder / "inspect")
        assert self.machines.wait(pid) == 0
        self.outcome("inspect")
        inspection = Inspection.model_validate_json(self.store.get(KEYS.inspection(NAME)))
        pinned = harness.pinned(scenario, ref=LoaderRef(source=f"{FILE}:make")).model_copy(
            update={"snapshot": self.snapshot}
        )
        plan = harness.sized(make_plan(pinned, {NAME: inspection}, FLAVORS), scenario)
        self.store.put(KEYS.plan, plan.to_bytes())
        return plan

    def outcome(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name / "outcome.json").read_text())
        assert found["ok"], (found, (self.folder / name / "log").read_text()[-3000:])
        return dict(found["result"])

    def start(self, machine: int) -> int:
        """Start the next try of a machine."""
        self.tries[machine] += 1
        more = {"plan": KEYS.plan, "machine": machine, "generation": self.tries[machine], "host": f"c1-{machine}"}
        return self.machines.start("prepare", self.input(**more), self.folder / self._name(machine))

    def _name(self, machine: int) -> str:
        return f"machine-{machine}-try-{self.tries[machine]}"

    def num_records(self) -> int:
        return len(list(self.store.list(KEYS.ledger(NAME))))

    def prepare(self, kills: list[tuple[int, int]]) -> None:
        """Run all machines at once; kill one whenever so many records are there, and try it again at once.

        ``kills``: (records, machine).
        """
        running = {machine: self.start(machine) for machine in range(self.plan.loaders[NAME].machines)}
        for records, machine in kills:
            machine %= len(running)
            until = time.monotonic() + 30
            while self.num_records() < records and time.monotonic() < until and self._is_busy(running):
                time.sleep(0.01)
            self.machines.kill(running[machine])
            running[machine] = self.start(machine)
        for machine, pid in running.items():
            assert self.machines.wait(pid) == 0
            self.outcome(self._name(machine))

    def _is_busy(self, running: dict[int, int]) -> bool:
        return not all((self.folder / self._name(machine) / "outcome.json").exists() for machine in running)


def drawn(number: int) -> tuple[Scenario, list[tuple[int, int]]]:
    """Return a scenario and its kills; the number is all there is to draw from."""
    draw = random.Random(number)
    kind = draw.choice(sorted(loaders.KINDS))
    is_iterable = loaders.KINDS[kind].is_iterable
    machines = draw.randint(2, 4)
    scenario = Scenario(
        kind,
        size=draw.randint(20, 60),
        workers=draw.randint(1, 4) if is_iterable else draw.randint(0, 3),
        units=draw.randint(60, 150),
        machines=machines,
        nnodes=draw.choice([1, 2]),
        nproc=draw.choice([1, 2, 4]),
        randomness=draw.choice(["element", "exact"]),
        seed=draw.randrange(2**40),
        first=2,
        largest=8,
    )
    kills = sorted((draw.randint(0, 20), draw.randrange(machines)) for _ in range(draw.randint(1, 4)))
    return scenario, kills


@pytest.mark.parametrize("number", range(NUM_CASES))
def test_ranks_that_read_while_machines_are_killed_receive_the_local_stream(
    number: int, machines: Machines, s3_server: S3Server, tmp_path: Path
) -> None:
    scenario, kills = drawn(number)
    site = Site(machines, s3_server.fresh_config(), scenario, tmp_path)
    epochs = harness.local_epochs(scenario)
    failed: list[BaseException] = []

    def read() -> None:
        try:
            harness.check_delivery(site.store, scenario, site.plan, tmp_path / "hosts", epochs=epochs)
        except BaseException as error:  # noqa: BLE001 (told by the test's own thread)
            failed.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        site.prepare(kills)
    finally:
        if reading.is_alive() and site.num_records() == 0:
            site.store.put(KEYS.abort, b"")
        reading.join(60)
    if failed:
        raise failed[0]
    assert not reading.is_alive()
