"""A GAN that loses no step: two optimizers, with a collective between their steps.

torchrun --nproc-per-node 2 examples/gallery/gan.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep.train as es


def train_fn(config):
    images = torch.tensor(load_digits().data[:400]).float() / 16
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    g, c = generator, critic
    if dist.is_initialized():
        g, c = DistributedDataParallel(generator), DistributedDataParallel(critic)
    of_g = torch.optim.Adam(g.parameters(), 1e-3, betas=(0.5, 0.999))
    of_c = torch.optim.Adam(c.parameters(), 5e-4, betas=(0.5, 0.999))

    models, optimizers = {"g": g, "c": c}, {"g": of_g, "c": of_c}
    state = es.protect(model=models, optimizer=optimizers, torn="shadow")
    data = es.loader(TensorDataset(images), global_batch_size=40)
    with state:
        for (real,) in data.batches(state, epochs=config.get("epochs", 3)):
            fake = g(torch.randn(len(real), 16))
            of_c.zero_grad()
            loss = F.softplus(-c(real)).mean() + F.softplus(c(fake.detach())).mean()
            loss.backward()
            of_c.step()
            of_g.zero_grad()
            F.softplus(-critic(fake)).mean().backward(inputs=list(g.parameters()))
            of_g.step()
            state.step(loss=loss)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train_fn({})
