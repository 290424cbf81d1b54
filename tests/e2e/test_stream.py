"""The stream that ranks receive is the one that the loader yields in one process, on the real Airflow."""

from __future__ import annotations

import hashlib
import json
import urllib.request
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from taas_tasks.layout import payload_key
from tests.e2e.runs import Runs
from tests.prep.oracle import local_stream

pytestmark = pytest.mark.stack

SEED = 11
DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset


def make_loader():
    return DataLoader(TensorDataset(torch.arange(75)), batch_size=2, shuffle=True, num_workers=2)
"""
TRAIN = """
import json
import torch.distributed as dist
import taas

dist.init_process_group(backend="nccl", init_method="env://")
data_loader = taas.loader("data_loader")
mine = [[batch[0].tolist() for batch in data_loader] for _ in range(2)]
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, mine)
if dist.get_rank() == 0:
    json.dump(everyone, open("received.json", "w"))
dist.destroy_process_group()
"""
CELL = """
import json
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(backend="nccl", init_method="env://")
ddp = DistributedDataParallel(model)
mine = []
for (batch,) in data_loader:
    ddp(batch.float().unsqueeze(1)).sum().backward()
    mine.append(batch.tolist())
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, mine)
if dist.get_rank() == 0:
    json.dump(everyone, open("received.json", "w"))
dist.destroy_process_group()
"""


def received(runs: Runs, run_id: str) -> list[Any]:
    """What rank 0 wrote: per rank, what it was given."""
    (artifact,) = runs.get("/taas/runs/artifacts", run_id=run_id).json()["files"]
    with urllib.request.urlopen(artifact["url"], timeout=30) as reply:
        data = reply.read()
    assert hashlib.sha256(data).hexdigest() == artifact["sha256"]
    return list(json.loads(data))


def by_the_rule(elements: list[Any], *, world_size: int) -> list[list[Any]]:
    """Rank r takes, at step t of an epoch, element t * world_size + r; a short end repeats from the epoch's start."""
    padded = elements + [elements[at % len(elements)] for at in range(-len(elements) % world_size)]
    return [padded[rank::world_size] for rank in range(world_size)]


def test_one_machine_and_eight_ranks_receive_two_epochs_of_the_local_stream(runs: Runs):
    runs.project("stream", {"data.py": DATA, "train.py": TRAIN})
    conf = {"project": "stream", "script": "train.py", "flavor": "g2.8", "gpus": 8, "cpus": 1, "units": 60}
    run_id = runs.start({**conf, "seed": SEED, "loaders": {"data_loader": "data.py:make_loader"}}, run_id="stream-1")
    assert runs.finished(run_id, wait_s=240) == "success", runs.log(run_id, "train")[-3000:]
    names: dict[str, Any] = {}
    exec(DATA, names)
    local = local_stream(names["make_loader"](), seed=SEED, units=60)
    epochs = [[item.element[0].tolist() for item in local if item.epoch == epoch] for epoch in (0, 1)]
    assert [len(epoch) for epoch in epochs] == [38, 22]
    expected = [by_the_rule(epoch, world_size=8) for epoch in epochs]
    assert received(runs, run_id) == [[epoch[rank] for epoch in expected] for rank in range(8)]
    account = runs.report(run_id)["loaders"]["data_loader"]
    assert (account["consumed"], account["padded"], account["explained"]) == (64, 4, True)


def test_thirty_two_ranks_run_a_captured_cell_on_a_pickled_loader(runs: Runs):
    runs.project("cells", {"note.txt": "a project without code"})
    loader = DataLoader(TensorDataset(torch.arange(80)), batch_size=1, shuffle=True)
    payloads = {
        "loader": cloudpickle.dumps(loader),
        "cell": cloudpickle.dumps(
            {"format": 1, "source": CELL, "namespace": {"model": torch.nn.Linear(1, 2)}, "loaders": ["data_loader"]}
        ),
    }
    refs = {}
    for name, data in payloads.items():
        sha256 = hashlib.sha256(data).hexdigest()
        refs[name] = {"payload": payload_key("cells", sha256), "sha256": sha256}
        runs.store.put(refs[name]["payload"], data)
    conf = {"project": "cells", "cell": refs["cell"], "flavor": "g2.8", "gpus": 32, "cpus": 2, "units": 80}
    run_id = runs.start({**conf, "seed": SEED, "loaders": {"data_loader": refs["loader"]}}, run_id="cells-1")
    assert runs.finished(run_id, wait_s=280) == "success", runs.log(run_id, "train")[-3000:]
    local = [item.element[0].tolist() for item in local_stream(loader, seed=SEED, units=80)]
    assert received(runs, run_id) == by_the_rule(local, world_size=32)
    report = runs.report(run_id)
    assert report["loaders"]["data_loader"]["consumed"] == 96
    assert [phase["machine_seconds"] > 0 for phase in report["phases"] if phase["name"] == "train"] == [True]
    assert runs.held_slots() == []
