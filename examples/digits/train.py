"""A digit classifier, trained with Lightning; nothing is said of ranks, hosts or backends."""

import json
import pathlib

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import taas


class Digits(pl.LightningModule):
    """float32 ``[batch, 64]`` to logits ``[batch, 10]``."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.losses.append(loss.item())
        taas.log(step=self.global_step, epoch=self.current_epoch, loss=loss.item())
        return loss

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            recent = self.losses[-self.trainer.num_training_batches :]
            print(f"epoch {self.current_epoch}  loss {sum(recent) / len(recent):.3f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    pl.seed_everything(0)
    model = Digits()
    trainer = pl.Trainer(
        max_epochs=8, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(model, taas.loader("data_loader"))
    trainer.save_checkpoint("digits.ckpt")
    if trainer.is_global_zero:
        pathlib.Path("losses.json").write_text(json.dumps(model.losses))


if __name__ == "__main__":
    main()
