"""A small byte-level language model, trained with plain PyTorch DDP on what `data_loader` yields."""

import json
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import taas

PASSES = 6


class BytesLM(nn.Module):
    """Bytes in, logits of the next byte out: int64 ``[batch, time]`` to float32 ``[batch, time, 256]``."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.embed(text))
        return self.head(hidden)


def main() -> None:
    dist.init_process_group(backend="nccl", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(BytesLM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    data_loader = taas.loader("data_loader")
    batches = (batch for _ in range(PASSES) for batch in data_loader)
    for step, batch in enumerate(batches):
        text = batch.long()
        loss = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
        if rank == 0 and step % 10 == 0:
            print(f"step {step:4d}  loss {losses[-1]:.3f}", flush=True)
        taas.log(step=step, loss=losses[-1])
    if rank == 0:
        torch.save(model.module.state_dict(), "bytes_lm.pt")
        pathlib.Path("losses.json").write_text(json.dumps(losses))
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps of {world_size} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
