"""Lightning's real Trainer in real processes: more epochs than were prepared, validation, a resume at another size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from taas_tasks.delivery.counters import read_passes
from taas_tasks.store import open_store
from taas_tasks.store.memory import MemoryStore
from tests.delivery.processes import PREAMBLE, feeder_process, said, start_ranks, stopped_at_the_end
from tests.delivery.support import Prepared, feeding, ids, launch_plan, rule
from tests.support.s3_server import S3Server

pytestmark = [pytest.mark.store, pytest.mark.filterwarnings("ignore")]  # Lightning's own
LIGHTNING = (
    PREAMBLE
    + """
import logging
warnings.filterwarnings("ignore")
import pytorch_lightning as pl
seen, validated, notes = [], [], []
class Notes(logging.Handler):
    def emit(self, record):
        notes.append(record.getMessage())
logging.getLogger("taas").addHandler(Notes())
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        seen.append(batch["id"].tolist())
        return self.layer(batch["x"]).mean()
    def validation_step(self, batch, number):
        validated.append(batch["id"].tolist())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0001)
where = {"dirpath": os.environ["ROOT"], "filename": "{step}"}
keep = pl.callbacks.ModelCheckpoint(every_n_train_steps=13, save_top_k=-1, **where)
trainer = pl.Trainer(
    max_epochs=4, strategy="ddp", accelerator="cpu", devices=2, num_nodes=1, callbacks=[keep], logger=False,
    enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    default_root_dir=os.environ["ROOT"],
)
model = Model()
trainer.fit(model, taas.loader("data"), taas.loader("validation"))
samplers = [type(one.sampler).__name__ for one in (trainer.train_dataloader, trainer.val_dataloaders)]
say([seen, validated, samplers, notes, trainer.global_step])
"""
)


def flat(epochs: Any) -> list[Any]:
    return [one for epoch in epochs for one in epoch]


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen += ids([batch])
        return self.layer(batch["x"]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def test_lightning_replays_beyond_the_units_and_resumes_with_other_ranks_at_the_very_next_element(
    s3_server: S3Server, tmp_path: Path
) -> None:
    config = s3_server.fresh_config()
    store = open_store(config)
    prepared = Prepared(store, units=50, length=20).commit_all()
    validation = Prepared(store, units=5, length=5, name="validation").commit_all()
    with feeder_process(config, launch_plan(prepared, validation, nproc=2), tmp_path) as (host, _):
        ranks = start_ranks(host, LIGHTNING, count=2, env={"ROOT": str(tmp_path)})
        with stopped_at_the_end(ranks):
            told = [said(process)[0] for process in ranks]
    for rank, (seen, validated, samplers, notes, steps) in enumerate(told):
        due = [rule(prepared, epoch=epoch, rank=rank, world_size=2) for epoch in (0, 1, 2, 0)]
        assert [tuple(one) for one in seen] == flat(due)  # the last element of each epoch is not lost
        assert steps == len(seen) == 35
        # not after the shorter, partial epoch: Lightning keeps the first epoch's length for its val_check_interval
        assert [tuple(one) for one in validated] == 3 * rule(validation, epoch=0, rank=rank, world_size=2)
        assert samplers == ["_WholePass", "_WholePass"]  # none that splits again
        assert any("pass 4 replays epoch 0: only 3 epoch(s) were prepared" in note for note in notes)
    passes = [one for one in read_passes(host.counters_dir) if one.loader == "data"]
    assert [(one.rank, one.epoch, one.num_steps, one.replay, one.complete) for one in passes] == [
        (rank, epoch, steps, at == 3, True)
        for rank in range(2)
        for at, (epoch, steps) in enumerate([(0, 10), (1, 10), (2, 5), (0, 10)])
    ]
    # step 13 of 2 ranks is 6 elements into epoch 1: one rank goes on there, and every later epoch is whole
    model = Model()
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path / "after") as host:
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(max_epochs=3, accelerator="cpu", devices=1, enable_checkpointing=False, **quiet)
        trainer.fit(model, host.loader(0), ckpt_path=tmp_path / "step=13.ckpt")
    whole = [(epoch, index) for epoch in range(3) for index in range([20, 20, 10][epoch])]
    assert model.seen == whole[26:]


def test_lightning_that_reloads_each_epoch_cuts_a_replay_behind_a_partial_epoch_and_begins_it_anew(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    prepared = Prepared(store, units=50, length=20).commit_all()
    model = Model()
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            max_epochs=5,
            accelerator="cpu",
            devices=1,
            enable_checkpointing=False,
            reload_dataloaders_every_n_epochs=1,
            **quiet,
        )
        trainer.fit(model, host.loader(0))
    passes = [(0, 20), (1, 20), (2, 10), (0, 10), (0, 20)]
    assert model.seen == [(epoch, index) for epoch, length in passes for index in range(length)]
