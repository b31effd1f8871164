"""A loop of Hugging Face Accelerate that loses no step: gradients of two micro-batches a step.

torchrun --nproc-per-node 2 examples/gallery/accelerate_loop.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everstep.train as es

EPOCHS = 3


def train_fn(config):
    digits = load_digits()
    images, labels = torch.tensor(digits.images[:400]).float() / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2))
    model.append(nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    loader = DataLoader(TensorDataset(images, labels[:400]), batch_size=10, shuffle=True)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    data = es.loader(loader)
    state = es.protect(accelerator=accelerator, extra={"data": data})
    with state:
        for inputs, targets in data.batches(state, epochs=config.get("epochs", EPOCHS)):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            state.step(loss=loss)


if __name__ == "__main__":
    train_fn({})
