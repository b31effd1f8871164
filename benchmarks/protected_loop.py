"""A protected loop that fills its core: what ``benchmarks kills`` uploads."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep.train as es

WIDTH, BATCH = 640, 160
"""What takes about 25 ms on a core."""


def train_fn(config):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(BATCH, WIDTH)
    state = es.protect(model=model, optimizer=optimizer)
    with state:
        while state.step_number < config["steps"]:
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step(loss=loss)
