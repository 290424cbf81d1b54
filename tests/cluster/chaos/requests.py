"""The requests of a chaos run: their files, their conf, and what is right when they succeed."""

from __future__ import annotations

import math
from typing import Any

from tests.cluster.chaos.schedule import Wanted
from tests.e2e.test_stream import by_the_rule
from tests.prep.oracle import local_stream

SEED = 5
FLAVOR, GPUS_PER_HOST = "g2.2", 2
EPOCH = 100
DATA = f"""
import time
import torch
from torch.utils.data import DataLoader, Dataset


class Paced(Dataset):
    def __len__(self):
        return {EPOCH}

    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.tensor(index)


def make_loader():
    return DataLoader(Paced(), batch_size=1, shuffle=True)
"""
PLAIN = """
import json, time
import torch
import torch.distributed as dist

dist.init_process_group(backend="nccl", init_method="env://")
total = torch.zeros(1)
for step in range(40):
    one = torch.ones(1)
    dist.all_reduce(one)
    total += one
    time.sleep(0.2)
if dist.get_rank() == 0:
    json.dump(total.item(), open("result.json", "w"))
dist.destroy_process_group()
"""
STREAM = """
import json, sys, time
import torch.distributed as dist
import taas

dist.init_process_group(backend="nccl", init_method="env://")
loader = taas.loader("data_loader")
mine = []
for _ in range(int(sys.argv[1])):
    mine.append([])
    for batch in loader:
        mine[-1].append(int(batch))
        time.sleep(0.05)
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, mine)
if dist.get_rank() == 0:
    json.dump(everyone, open("result.json", "w"))
dist.destroy_process_group()
"""
RESTARTED = """
import json, time
import torch.distributed as dist
import taas

dist.init_process_group(backend="nccl", init_method="env://")
loader = taas.loader("data_loader")
step, everyone = 0, [[] for _ in range(dist.get_world_size())]
if (found := taas.checkpoint.latest()) is not None:
    step, state = found
    everyone = state["everyone"]
    loader.load_state_dict(state["loader"])
for batch in loader:
    taken = [None] * dist.get_world_size()
    dist.all_gather_object(taken, int(batch))
    for rank, index in enumerate(taken):
        everyone[rank].append(index)
    step += 1
    if step % 5 == 0:
        taas.checkpoint({"everyone": everyone, "loader": loader.state_dict()}, step=step)
    time.sleep(0.2)
if dist.get_rank() == 0:
    json.dump([everyone], open("result.json", "w"))
dist.destroy_process_group()
"""
FILES = {"data.py": DATA, "plain.py": PLAIN, "stream.py": STREAM, "restarted.py": RESTARTED}


def world_size(wanted: Wanted) -> int:
    """Return the number of ranks."""
    return wanted.num_hosts * GPUS_PER_HOST


def conf(wanted: Wanted, *, project: str) -> dict[str, Any]:
    """Return the request."""
    made: dict[str, Any] = {
        "project": project,
        "script": f"{wanted.kind}.py",
        "flavor": FLAVOR,
        "gpus": world_size(wanted),
        "seed": SEED,
        "timeout_s": 600,
    }
    if wanted.kind == "stream":
        made["args"] = [str(math.ceil(wanted.units / EPOCH))]
    if wanted.kind == "restarted":
        made["max_restarts"] = 2
    if wanted.units:
        made |= {"cpus": wanted.cpus, "units": wanted.units, "loaders": {"data_loader": "data.py:make_loader"}}
    return made


def expected(wanted: Wanted) -> Any:
    """Return what ``result.json`` holds when all is right: for data, per rank and epoch the elements it was given."""
    if wanted.kind == "plain":
        return 40.0 * world_size(wanted)
    names: dict[str, Any] = {}
    exec(DATA.replace("time.sleep(0.05)", "pass"), names)
    local = local_stream(names["make_loader"](), seed=SEED, units=wanted.units)
    epochs = [
        [int(item.element) for item in local if item.epoch == epoch] for epoch in range(math.ceil(wanted.units / EPOCH))
    ]
    shared = [by_the_rule(epoch, world_size=world_size(wanted)) for epoch in epochs]
    if wanted.kind == "restarted":
        return [shared[0]]
    return [[epoch[rank] for epoch in shared] for rank in range(world_size(wanted))]
