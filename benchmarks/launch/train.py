"""The script that every launcher runs, unchanged. Each rank notes what it reaches, in a file of its own on its host."""

from __future__ import annotations

import time

began = time.time()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

num_steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
rank = int(os.environ["RANK"])
notes = Path(f"/tmp/{os.environ['BENCH_RUN']}.{rank}.notes").open("a", buffering=1)  # noqa: SIM115


def note(event: str, at: float) -> None:
    notes.write(json.dumps({"rank": rank, "pid": os.getpid(), "event": event, "at": at}) + "\n")


note("script", began)
dist.init_process_group("gloo", init_method="env://")
note("rendezvous", time.time())
model = DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(num_steps):
    total = torch.ones(1)
    dist.all_reduce(total)
    if int(total) != dist.get_world_size():
        note("wrong", time.time())
    optimizer.zero_grad()
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    note("step", time.time())
    time.sleep(pause_s)
dist.destroy_process_group()
note("done", time.time())
