"""A training loop of one's own that loses no step, in the service, under torchrun or alone.

everstep submit --code examples/own_loop --train-fn train:train_fn --set scaling.max_workers=2
torchrun --nproc-per-node 2 examples/own_loop/train.py
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
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)
    )
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)

    state = es.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    data = es.loader(TensorDataset(images, torch.tensor(digits.target)), global_batch_size=64)
    with state:
        for inputs, labels in data.batches(state, epochs=config.get("epochs", 5)):
            loss = F.cross_entropy(model(inputs), labels) * data.weight
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state.step(loss=loss)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group()
    train_fn({})
