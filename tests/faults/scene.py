"""A run from its project to its ranks, its store behind a proxy that fails as told: every part is the real one."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taas_tasks import project
from taas_tasks.delivery.feeder import Feeder
from taas_tasks.delivery.repair import Repairs, RepairSetup
from taas_tasks.layout import RunKeys, run_key
from taas_tasks.prep import prepare_program
from taas_tasks.prep.repair_program import RepairInput
from taas_tasks.store.answers import Retries
from taas_tasks.store.base import ObjectStore
from taas_tasks.store.s3 import S3Store
from taas_tasks.values import (
    Inspection,
    LaunchPlan,
    LoaderPlan,
    Plan,
    SegmentSizes,
    ShardRecord,
    StoreConfig,
    Versions,
)
from tests.delivery.support import Host, new_host
from tests.prep import oracle
from tests.support.faulty_proxy import RequestProxy

RUN_ID = "manual__faults"
RUN = run_key(RUN_ID)
KEYS = RunKeys(RUN)
ROOT = Path(__file__).parents[2]
TWO_STREAMS = {
    "kind": "iterable",
    "order": "sequential",
    "read_by": "workers",
    "num_streams": 2,
    "num_loader_workers": 2,
    "epoch_length": None,
}
"""What inspect finds of an iterable with two loader workers."""

NUMBERS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return {"at": index, "x": torch.randn(64)}

def make_loader():
    return DataLoader(Numbers(), batch_size=None)
"""


@dataclass
class Scene:
    """``far`` is the config of the store behind the proxy, ``near`` the same store without it."""

    far: StoreConfig
    near: ObjectStore
    folder: Path
    proxy_or_none: RequestProxy | None = None
    source: str = NUMBERS
    units: int = 96
    length: int = 48
    snapshot: str = ""
    inspection: dict[str, Any] = field(default_factory=dict)

    @property
    def proxy(self) -> RequestProxy:
        assert self.proxy_or_none is not None
        return self.proxy_or_none

    def __post_init__(self) -> None:
        project.commit(self.near, "demo", {"data_of_faults.py": self.source.encode()}, author="ada")
        self.snapshot = project.head(self.near, "demo")[1]
        self.near.put(KEYS.plan, self.plan.to_bytes())

    @property
    def loader_plan(self) -> LoaderPlan:
        found = {
            "kind": "map",
            "order": "recipe",
            "epoch_length": self.length,
            "claimed_length": self.length,
            "num_loader_workers": 0,
            "batch_size": None,
            "element_bytes": 300,
            "element_seconds": 0.001,
            "sampled_elements": 4,
            "versions": Versions(python="3.11"),
        }
        return LoaderPlan(
            loader="data",
            units=self.units,
            machines=1,
            inspection=Inspection(loader="data", **{**found, **self.inspection}),
            sizes=SegmentSizes(first=4, largest=32, machines=1),
            source="data_of_faults.py:make_loader",
        )

    @property
    def plan(self) -> Plan:
        return Plan(
            run=RUN,
            run_id=RUN_ID,
            project="demo",
            snapshot=self.snapshot,
            loaders={"data": self.loader_plan},
            seed=7,
            randomness="element",
            remainder="pad",
            flavor="g2.8",
            nnodes=1,
            nproc_per_node=1,
            cpus=1,
        )

    def launch_plan(self, **more: Any) -> LaunchPlan:
        shared = self.plan.model_dump(
            include={"run", "run_id", "project", "snapshot", "loaders", "seed", "nnodes", "nproc_per_node", "flavor"}
        )
        return LaunchPlan(**{**shared, "generation": 1, "emulate_gpus": True, "cache_bytes": 1 << 26, **more})

    def common(self, *, generation: int = 1, config: StoreConfig | None = None) -> dict[str, Any]:
        return {
            "store": (config or self.far).model_dump(mode="json"),
            "run": RUN,
            "run_id": RUN_ID,
            "project": "demo",
            "snapshot": self.snapshot,
            "generation": generation,
            "host": "c1-0",
            "host_root": "",
        }

    def prepare_input(self, *, generation: int = 1, config: StoreConfig | None = None) -> dict[str, Any]:
        return {
            **self.common(generation=generation, config=config),
            "plan": KEYS.plan,
            "loader": "data",
            "machine": 0,
        }

    def prepare(self, *, retries: Retries | None = None, **more: Any) -> dict[str, Any]:
        """Run the machine's program in this process, up to where it would write its outcome."""
        given = prepare_program.PrepareInput.model_validate(self.prepare_input(**more))
        folder = self.folder / "project"
        folder.mkdir(exist_ok=True)
        return prepare_program.run(given, S3Store(given.store, retries=retries), folder)

    def repair_input(self, record: ShardRecord, *, generation: int) -> RepairInput:
        return RepairInput.model_validate(
            {
                **self.common(generation=generation),
                "plan": KEYS.plan,
                "loader": "data",
                "epoch": record.epoch,
                "stream": record.stream,
                "n": record.n,
            }
        )

    def records(self) -> list[ShardRecord]:
        return oracle.records_of(self.near, RUN, "data")

    def record_key(self, record: ShardRecord) -> str:
        return KEYS.ledger_record("data", record.epoch, record.stream, record.n)

    def objects(self, *prefixes: str) -> dict[str, bytes]:
        return {
            info.key: self.near.get(info.key) for prefix in prefixes or (KEYS.root,) for info in self.near.list(prefix)
        }

    def committed(self) -> list[oracle.Item]:
        stored = oracle.committed_stream(self.near, RUN, "data")
        oracle.assert_padding(stored)
        return stored.stream

    @property
    def repair_folder(self) -> Path:
        return self.folder / "repair"

    def repair_setup(self, **more: Any) -> RepairSetup:
        # The record's patience is short: nothing is being prepared while a feeder runs here.
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return RepairSetup(**{"folder": str(self.repair_folder), "env": env, "record_patience_s": 0.5, **more})

    @contextmanager
    def feeding(
        self, *, config: StoreConfig | None = None, retries: Retries | None = None, **more: Any
    ) -> Iterator[Host]:
        """A host whose feeder runs in a thread; what it has repaired is a process of its own."""
        plan = self.launch_plan(**more)
        store = config or self.far
        repairs = Repairs(self.repair_setup(), store=store, plan=plan, node_rank=0, host="host-0")
        with new_host(plan, self.folder) as host:
            feeder = Feeder(
                S3Store(store, retries=retries),
                plan,
                node_rank=0,
                socket_path=host.socket_path,
                cache_dir=host.folder / "cache",
                stats_path=host.stats_path,
                host="host-0",
                repairs=repairs,
            )
            thread = threading.Thread(target=feeder.serve)
            thread.start()
            try:
                yield host
            finally:
                feeder.stop()
                thread.join(30)
                assert not thread.is_alive()

    def delivered(self, host: Host) -> list[oracle.Item]:
        """What the one rank receives in as many passes as there are epochs."""
        loader = host.loader(0)
        return [
            oracle.Item(epoch, at, element)
            for epoch in range(self.units // self.length)
            for at, element in enumerate(loader)
        ]

    def repairs(self) -> list[str]:
        found: list[str] = json.loads((self.folder / "node-0" / "stats.json").read_text())["repairs"]
        return found
