"""A task with a state of its own, which decides what is trained, and what plain torch makes of it
on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.integration.moving_buffers import GLOBAL_BATCH, MICRO_BATCH, NUM_SAMPLES, SPEC, Rows
from train_fn.loop import build
from train_fn.samples.sampler import Sampler, key


class Annealed:
    """Weighs its loss by what every epoch's end halves, and tilts it by a tensor."""

    def __init__(self) -> None:
        self.scale, self.tilt = 1.0, torch.zeros(4)

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Rows(), "val": None}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        found = model(batch["x"] + self.tilt).squeeze(1)
        return self.scale * F.mse_loss(found, batch["y"], reduction="sum"), len(batch["y"])

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        self.scale *= 0.5
        self.tilt += 0.25

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "nested": [{"tilt": self.tilt}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.tilt = state["scale"], state["nested"][0]["tilt"]


def annealed_task() -> None:
    build.build_task = lambda spec: Annealed()


def plain_losses(num_steps: int) -> list[float]:
    torch.manual_seed(key(SPEC.train.seed, 6))
    task, rows = Annealed(), Rows()
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=SPEC.optimizer.lr)
    sampler = Sampler(NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, SPEC.train.seed)
    losses = []
    for step in range(num_steps):
        epoch, k = divmod(step, sampler.steps_per_epoch)
        chosen = torch.tensor(sampler.global_batch(epoch, k))
        optimizer.zero_grad()
        loss, size = task.loss(model, {"x": rows.x[chosen], "y": rows.x[chosen].prod(dim=1)})
        (loss / size).backward()
        optimizer.step()
        losses.append(float(loss.detach()) / size)
        if k == sampler.steps_per_epoch - 1:
            task.on_epoch_end(model, epoch, {})
    return losses
