"""What the cluster's tests do with runs: those of the end-to-end tests, and what happens on the hosts."""

from __future__ import annotations

from pathlib import Path

from taas_tasks.compute.inventory import Host
from taas_tasks.compute.job import job_id
from taas_tasks.compute.ssh import SshTransport
from taas_tasks.stack import Stack, processes
from tests.cluster.cluster import PYTHON, Cluster
from tests.e2e.runs import DAG, Runs, until

FINISH = "/srv/taas/finish"
TRAIN = f"""
import pathlib
import time
import torch
import torch.distributed as dist

dist.init_process_group(backend="nccl", init_method="env://")
print("training now", flush=True)
done = torch.zeros(1)
while not done.item():
    done.fill_(pathlib.Path("{FINISH}").exists())
    dist.all_reduce(done)
    time.sleep(0.2)
if dist.get_rank() == 0:
    pathlib.Path("model.txt").write_text(f"trained by {{dist.get_world_size()}}")
dist.destroy_process_group()
"""
GANG = {"script": "train.py", "flavor": "g2.2", "gpus": 4}
GPU_HOSTS = ("g2-0", "g2-1")


class ClusterRuns(Runs):
    """A client of a stack that drives a cluster."""

    def __init__(self, stack: Stack, cluster: Cluster) -> None:
        super().__init__(stack)
        self.cluster = cluster

    def transport(self, host: Host) -> SshTransport:
        """The host as the engine reaches it."""
        machine = next(one for one in self.cluster.hosts if one.connection_id == host.connection_id)
        return SshTransport(self.cluster.address(machine.name), Path(host.root), python=PYTHON)

    def held_slots(self) -> list[str]:
        owned = [host for host in self.hosts() if host.name.startswith(("c1", "g2"))]
        return [slot["owner"] for host in owned for slot in self.transport(host).call("slots", {})["slots"]]

    def train(self, run_id: str, **conf: object) -> str:
        """Start a training on both GPU hosts that goes on until ``finish``; returns when it trains."""
        self.keep_on()
        self.project(run_id, {"train.py": TRAIN})
        self.start({"project": run_id, **GANG, **conf}, run_id=run_id)
        self.trains(run_id)
        return run_id

    def trains(self, run_id: str, *, tries: int = 1) -> None:
        """Wait until a try trains."""
        until(lambda: "training now" in self.log(run_id, "train", tries=tries), wait_s=150)

    def keep_on(self) -> None:
        """Have trainings go on."""
        for name in GPU_HOSTS:
            self.cluster.exec(name, ["rm", "-f", FINISH])

    def finish(self) -> None:
        """Have every training that runs, or will, come to its end."""
        for name in GPU_HOSTS:
            self.cluster.exec(name, ["touch", FINISH])

    def job_ids(self, run_id: str, generation: int) -> dict[str, str]:
        """The jobs of a try of a training on more than one host, by the host's name."""
        names = [host.name for host in self.hosts()]
        return {name: job_id(DAG, run_id, f"train-{name}", -1, generation) for name in names}

    def left_of(self, run_id: str, *, generations: range = range(1, 5)) -> list[str]:
        """Every process on any host that works for a training, in words."""
        jobs = [job for generation in generations for job in self.job_ids(run_id, generation).values()]
        return [f"{one.host}: {one.command}" for one in self.cluster.processes_of(*jobs)]

    def kill_airflow(self) -> None:
        """Kill Airflow's four processes and all that they started, at once."""
        mark = f"{processes.MARKER}={self.stack.environment()[processes.MARKER]}".encode()
        processes.kill_all(lambda: processes.marked({mark}))
