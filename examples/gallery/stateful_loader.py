"""A loop with torchdata's StatefulDataLoader that loses no step: the loader restores its place.

torchrun --nproc-per-node 2 examples/gallery/stateful_loader.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep.train as es


def train_fn(config):
    digits = load_digits()
    images, labels = torch.tensor(digits.data[:400]).float() / 16, digits.target[:400]
    dataset = TensorDataset(images, torch.tensor(labels))
    sampler = DistributedSampler(dataset) if dist.is_initialized() else None
    loader = StatefulDataLoader(dataset, batch_size=20, sampler=sampler, shuffle=sampler is None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    data = es.loader(loader)
    state = es.protect(model=model, optimizer=optimizer, extra={"data": data})
    with state:
        for inputs, targets in data.batches(state, epochs=config.get("epochs", 3)):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step(loss=loss)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train_fn({})
