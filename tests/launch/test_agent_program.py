"""Whole trainings on emulated nodes: real agents, ranks, gloo and object store."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from taas.errors import DeliveryError
from taas_tasks.layout import RunKeys
from taas_tasks.values import StagedArtifacts
from taas_tasks.verdict import launch_error
from tests.delivery.support import RUN, Prepared
from tests.launch.conftest import MakeGang
from tests.launch.gang import Gang

DDP = """
    import os, sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def main():
        dist.init_process_group(backend='nccl', init_method='env://')
        rank, world = dist.get_rank(), dist.get_world_size()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        model = DDP(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
        print(f"sum={int(ones)} world={world} rank={rank} local={os.environ['LOCAL_RANK']} argv={sys.argv}")
        if rank == 0:
            torch.save(model.module.state_dict(), "model.pt")
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize(("nnodes", "nproc"), [(1, 8), (2, 2), (4, 8)])
def test_plain_ddp_script_trains_on_all_ranks(make_gang: MakeGang, nnodes: int, nproc: int) -> None:
    gang = make_gang(DDP, nnodes=nnodes, nproc=nproc, plan={"args": ["--lr", "0.1"]})
    result = gang.wait()
    assert result.ok, gang.all_output()
    world = nnodes * nproc
    for node_rank in range(nnodes):
        for local in range(nproc):
            rank = node_rank * nproc + local
            line = f"[host-{node_rank} r{rank}] sum={world} world={world} rank={rank} local={local}"
            assert f"{line} argv=['train.py', '--lr', '0.1']" in gang.out(node_rank)
    assert [rank.exit_code for node in result.nodes for rank in node.ranks] == [0] * world
    assert all(rank.first_step_at for node in result.nodes for rank in node.ranks)
    for node in result.nodes:
        assert node.measured is not None
        assert node.measured.interface == "lo"
        assert (node.measured.gloo_mb_per_s or 0) > 0 if nnodes > 1 else node.measured.gloo_mb_per_s is None
    assert gang.out(0).count("NO GPU HERE") == 1
    assert (gang.project() / "model.pt").exists()
    assert gang.processes() == []


DELIVERED = """
    import os, signal, sys, time
    import taas, torch, torch.distributed as dist
    dist.init_process_group("nccl", init_method="env://")
    loader = taas.loader("data")
    for element in loader:
        print("ID", element["id"].tolist())
    taas.log(loss=0.5)
    if len(sys.argv) > 1:
        dist.barrier()
        print("ready", flush=True)
        time.sleep(300)
    dist.destroy_process_group()
"""


def test_delivered_elements_are_counted_in_the_results(make_gang: MakeGang) -> None:
    prepared: list[Prepared] = []

    def prepare(gang: Gang) -> None:
        prepared.append(Prepared(gang.store, units=21, length=21).commit_all())
        gang.plan["loaders"] = {"data": prepared[0].plan.model_dump()}

    gang = make_gang(DELIVERED, nnodes=2, nproc=2, run=RUN, before=prepare, plan={})
    result = gang.wait()
    assert result.ok, gang.all_output()
    out = gang.out(0) + gang.out(1)
    ids = sorted(int(line.split(", ")[1].rstrip("]")) for line in out.splitlines() if "ID [" in line)
    assert ids == sorted([*range(21), 0, 1, 2])  # padded to six steps of four ranks
    for node in result.nodes:
        for rank in node.ranks:
            assert [(one.number, one.num_steps, one.complete) for one in rank.passes] == [(0, 6, True)]
        assert node.delivered["data"] >= 10
        assert node.delivered_bytes["data"] > 0
        assert {"agent_started", "preflight_done", "ranks_started", "ranks_ended"} <= set(node.times)
    assert json.loads(gang.store.get(RunKeys(RUN).metrics(1)))["loss"] == 0.5


def test_dead_feeder_ends_the_training_as_a_matter_of_data(make_gang: MakeGang) -> None:
    def prepare(gang: Gang) -> None:
        one = Prepared(gang.store, units=4, length=4).commit_all()
        gang.plan["loaders"] = {"data": one.plan.model_dump()}

    gang = make_gang(DELIVERED, nproc=1, run=RUN, before=prepare, plan={"args": ["stay"]})
    gang.wait_for("ready")
    feeders = [
        pid for pid in gang.processes() if b"taas_tasks.delivery.feeder" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(feeders) == 1
    os.kill(feeders[0], signal.SIGKILL)
    error = launch_error(gang.wait())
    assert isinstance(error, DeliveryError)
    assert "the feeder ended with code -9" in error.message


def test_rank_0s_files_are_staged_and_nothing_else(make_gang: MakeGang) -> None:
    script = """
        import os, helper
        if os.environ["RANK"] == "0":
            open("model.bin", "w").write("weights")
            open("kept.txt", "a").write(" and more")
    """
    gang = make_gang(script, files={"kept.txt": "text", "helper.py": ""}, nproc=2)
    assert gang.wait().ok, gang.all_output()
    staged = StagedArtifacts.model_validate_json(gang.store.get(RunKeys(gang.run).staged(1)))
    assert sorted(one.path for one in staged.files) == ["kept.txt", "model.bin"]
    assert "staged" in gang.result().nodes[0].times


def test_two_gangs_on_one_host_at_once_have_ports_of_their_own(make_gang: MakeGang) -> None:
    script = """
        import os, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print("port=" + os.environ["MASTER_PORT"], "ready", flush=True)
        while not os.path.exists("leave"):
            time.sleep(0.05)
        dist.barrier()
    """
    gangs = [make_gang(script, nproc=1), make_gang(script, nproc=1)]
    for gang in gangs:
        gang.wait_for("ready")  # both are there at this moment
    ports = [gang.out().split("port=")[1].split()[0] for gang in gangs]
    assert ports[0] != ports[1]
    for gang in gangs:
        (gang.project() / "leave").touch()
        assert gang.wait().ok, gang.all_output()
