"""An Engine of PyTorch-Ignite that loses no step; it needs nothing but ``protect``.

torchrun --nproc-per-node 2 examples/gallery/ignite_engine.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Engine
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep.train as es

if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    digits = load_digits()
    images, labels = torch.tensor(digits.data[:400]).float() / 16, torch.tensor(digits.target[:400])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = es.protect(model=model, optimizer=optimizer)
    data = es.loader(TensorDataset(images, labels), global_batch_size=40)

    def update(engine, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1]) * data.weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step(loss=loss)

    with state:
        left = 30 - state.step_number
        Engine(update).run(data.batches(state, steps=30), max_epochs=1, epoch_length=left)
