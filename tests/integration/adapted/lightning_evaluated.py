"""A LightningModule that is evaluated, and does something when an epoch ends.

``CASE`` names what it does. Rank 0 writes what Lightning knows at the end.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.utilities import CombinedLoader
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import everstep.train as es

NAME, CASE = Path(sys.argv[0]).stem, os.environ["CASE"]
SETTINGS = {
    "mid": {"val_check_interval": 4, "limit_val_batches": 2},
    "steps": {"max_epochs": -1, "max_steps": 13},
    "limit": {"limit_train_batches": 6, "reload_dataloaders_every_n_epochs": 1},
}


def loader(first, last, shuffle=True):
    digits = load_digits()
    images, labels = torch.tensor(digits.data[first:last]).float() / 16, digits.target[first:last]
    return DataLoader(TensorDataset(images, torch.tensor(labels)), batch_size=10, shuffle=shuffle)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2)]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))
        self.trace = []
        self.automatic_optimization = CASE != "manual"

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        if CASE == "two":
            return self.loss(batch["long"]) + self.loss(batch["short"])
        loss = self.loss(batch)
        if CASE == "manual":
            self.manual_backward(loss)
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        self.trace.append([self.global_step, float(self.trainer.callback_metrics["val_loss"])])

    def on_train_epoch_end(self):
        self.trace.append(["end of epoch", self.current_epoch, self.global_step])
        if CASE == "manual":
            self.lr_schedulers().step()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["trace"] = list(self.trace)

    def on_load_checkpoint(self, checkpoint):
        self.trace = list(checkpoint["trace"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


if __name__ == "__main__":
    seed_everything(0)
    saved = ModelCheckpoint(f"{NAME}-saved", monitor="val_loss", save_top_k=2, save_last=True)
    callbacks = {
        "early": [EarlyStopping("val_loss", mode="max", patience=2), saved],
        "steps": [ModelCheckpoint(f"{NAME}-saved", every_n_train_steps=3, save_top_k=-1)],
        "accumulate": [GradientAccumulationScheduler({0: 1, 1: 2})],
    }.get(CASE, [])
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=CASE in ("early", "steps"),
        callbacks=[*callbacks, es.lightning.Protect()],
        **{"max_epochs": 4, **SETTINGS.get(CASE, {})},
    )  # fmt: skip
    train = loader(0, 200)
    if CASE == "two":
        train = CombinedLoader({"long": train, "short": loader(200, 260)}, "max_size_cycle")
    net = Net()
    trainer.fit(net, train, loader(400, 480, shuffle=False))
    if os.environ["RANK"] == "0":
        told = {
            "steps": trainer.global_step,
            "epoch": trainer.current_epoch,
            "trace": net.trace,
            "saved": sorted(each.name for each in Path(f"{NAME}-saved").glob("*")),
            "waited": callbacks[0].wait_count if CASE == "early" else None,
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
        }
        Path(f"{NAME}.json").write_text(json.dumps(told))
