"""A GAN with manual optimization in Lightning that loses no step.

torchrun --nproc-per-node 2 examples/gallery/lightning_gan.py
"""

import os

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everstep.train as es


class Gan(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
        self.c = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        of_g, of_c = self.optimizers()
        for optimizer in (of_c, of_g):
            self.toggle_optimizer(optimizer)
            fake = F.softplus(-self.c(self.g(torch.randn(len(batch[0]), 16)))).mean()
            loss = fake if optimizer is of_g else F.softplus(-self.c(batch[0])).mean() - fake
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return loss

    def configure_optimizers(self):
        return [torch.optim.Adam(each.parameters(), 1e-3) for each in (self.g, self.c)]


if __name__ == "__main__":
    seed_everything(0)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    strategy = DDPStrategy(find_unused_parameters=True) if "RANK" in os.environ else "auto"
    trainer = Trainer(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")),
                      strategy=strategy, max_epochs=3, **quiet,
                      callbacks=[es.lightning.Protect(torn="shadow")])  # fmt: skip
    images = torch.tensor(load_digits().data[:400]).float() / 16
    trainer.fit(Gan(), DataLoader(TensorDataset(images), batch_size=20, shuffle=True))
