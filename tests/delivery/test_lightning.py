from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from taas.errors import DeliveryError
from taas_tasks.delivery.loader import process_group_size
from taas_tasks.store.memory import MemoryStore
from tests.delivery.support import Prepared, feeding, ids, launch_plan

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own


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


def trainer(folder: Path, **more: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, default_root_dir=folder, **quiet, **more)


@pytest.mark.parametrize(("step", "first"), [(7, (0, 7)), (14, (1, 4)), (10, (1, 0))])
def test_lightning_resumes_from_its_checkpoint_at_the_very_next_element(tmp_path: Path, step: int, first: Any) -> None:
    store = MemoryStore()
    prepared = Prepared(store, units=20, length=10).commit_all()
    whole = [(epoch, index) for epoch in range(2) for index in range(10)]
    with feeding(store, launch_plan(prepared, nproc=1), tmp_path) as host:
        named = {"dirpath": tmp_path, "filename": "{step}"}
        keep = pl.callbacks.ModelCheckpoint(every_n_train_steps=step, save_top_k=-1, **named)
        before, after = Model(), Model()
        trainer(tmp_path, callbacks=[keep]).fit(before, host.loader(0))
        path = tmp_path / f"step={step}.ckpt"
        trainer(tmp_path, enable_checkpointing=False).fit(after, host.loader(0), ckpt_path=path)
    assert before.seen == whole
    assert after.seen == whole[whole.index(first) :]


def test_a_default_trainer_that_starts_no_process_group_is_told_what_to_do(tmp_path: Path) -> None:
    store = MemoryStore()
    prepared = Prepared(store, units=20, length=10).commit_all()
    with feeding(store, launch_plan(prepared, nproc=2), tmp_path) as host:
        loader = host.loader(0, group_size=process_group_size)
        with pytest.raises(DeliveryError, match=r"delivered to 2 ranks, but there is no process group.*strategy='ddp'"):
            trainer(tmp_path, enable_checkpointing=False).fit(Model(), loader)
