"""Whole trainings on emulated nodes: real agents, ranks, gloo and object store."""

from __future__ import annotations

import pytest

from tests.launch.conftest import MakeGang

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


@pytest.mark.parametrize(("nnodes", "nproc"), [(1, 2), (2, 2), (4, 2)])
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
    assert gang.out(0).count("NO GPU HERE") == 1
    assert (gang.project() / "model.pt").exists()
    assert gang.processes() == []
