"""Hugging Face accelerate's real ``prepare`` in two real processes: right elements on the right ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from taas_tasks.delivery.counters import read_passes
from taas_tasks.store import open_store
from tests.delivery.processes import PREAMBLE, feeder_process, said, start_ranks, stopped_at_the_end
from tests.delivery.support import Prepared, launch_plan, rule
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.store
SCRIPT = (
    PREAMBLE
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Linear(4, 1)
loader = taas.loader("data")
model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), loader)
seen, synced, gathered = [], [], []
for epoch in range(3):
    for batch in prepared:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"]).mean())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(batch["id"].tolist())
        synced.append(accelerator.sync_gradients)
        gathered.append(accelerator.gather_for_metrics(batch["id"]).tolist())
for batch in prepared:
    break
state = prepared.state_dict()
try:
    next(iter(accelerator.skip_first_batches(prepared, 2)))
except Exception as error:
    refused = str(error)
say([prepared is loader, seen, synced, gathered, accelerator.gradient_state.in_dataloader, state, refused])
"""
)


def test_accelerate_trains_on_the_elements_of_its_ranks_and_accumulates_within_a_pass(
    s3_server: S3Server, tmp_path: Path
) -> None:
    config = s3_server.fresh_config()
    prepared = Prepared(open_store(config), units=33, length=20).commit_all()
    with feeder_process(config, launch_plan(prepared, nproc=2), tmp_path) as (host, _):
        ranks = start_ranks(host, SCRIPT, count=2)
        with stopped_at_the_end(ranks):
            told = [said(process)[0] for process in ranks]
    whole = [[rule(prepared, epoch=epoch, rank=rank, world_size=2) for epoch in (0, 1, 0)] for rank in range(2)]
    for rank, (is_same, seen, synced, gathered, is_inside, state, refused) in enumerate(told):
        assert is_same
        assert [tuple(one) for one in seen] == [one for epoch in whole[rank] for one in epoch]
        # every fourth step, and each pass's last one: steps of 10, 7 and 10
        due = [[step % 4 == 3 or step == steps - 1 for step in range(steps)] for steps in (10, 7, 10)]
        assert synced == [one for steps in due for one in steps]
        both = zip(*([one for epoch in mine for one in epoch] for mine in whole), strict=True)
        assert gathered == [[number for one in pair for number in one] for pair in both]
        assert not is_inside
        assert (state["pass"], state["position"]) == (3, 2)
        assert "use the loader's own state_dict and load_state_dict" in refused
    passes = read_passes(host.counters_dir)
    assert [(one.rank, one.epoch, one.num_steps, one.replay) for one in passes if one.complete] == [
        (rank, epoch, steps, replay)
        for rank in range(2)
        for epoch, steps, replay in ((0, 10, False), (1, 7, False), (0, 10, True))
    ]
