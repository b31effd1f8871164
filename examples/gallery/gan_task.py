"""A GAN as a task: two optimizers, one step. Everstep brings loop, data order and evaluation.

everstep submit --code examples/gallery --task gan_task:Gan --set train.global_batch_size=40
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Gan:
    def build_model(self):
        generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
        critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        return nn.ModuleDict({"generator": generator, "critic": critic})

    def build_datasets(self):
        images = torch.tensor(load_digits().data).float() / 16
        return {"train": TensorDataset(images[:400]), "val": TensorDataset(images[400:500])}

    def build_optimizer(self, model):
        return {
            "generator": torch.optim.Adam(model["generator"].parameters(), 1e-3, (0.5, 0.999)),
            "critic": torch.optim.Adam(model["critic"].parameters(), 5e-4, (0.5, 0.999)),
        }

    def training_step(self, model, batch, step, optimizers):
        [real] = batch
        generator, critic = model["generator"], model["critic"]
        fake = generator(torch.randn(len(real), 16))
        optimizers["critic"].zero_grad()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        optimizers["critic"].step()
        optimizers["generator"].zero_grad()
        fooled = F.softplus(-critic(fake)).mean()
        fooled.backward()
        optimizers["generator"].step()
        return {"loss": loss, "fooled": fooled}

    def metrics(self, model, batch):
        [real] = batch
        return {"accuracy": ((model["critic"](real) > 0).sum(), len(real))}
