"""A LightningModule and a LightningDataModule that lose no step.

torchrun --nproc-per-node 2 examples/gallery/lightning_module.py
"""

import os

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import everstep.train as es


class Digits(LightningDataModule):
    def train_dataloader(self):
        digits = load_digits()
        images, labels = torch.tensor(digits.data[:400]).float() / 16, digits.target[:400]
        return DataLoader(TensorDataset(images, torch.tensor(labels)), batch_size=10, shuffle=True)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


if __name__ == "__main__":
    seed_everything(0)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(accelerator="cpu", devices=devices, max_epochs=3, **quiet,
                      accumulate_grad_batches=2, callbacks=[es.lightning.Protect()])  # fmt: skip
    trainer.fit(Net(), Digits())
