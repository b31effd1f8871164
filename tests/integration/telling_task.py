"""A task that uses whatever a task may say of its updates: a scheduler, a hook after each step with
a teacher, a queue and clipped weights, the step in its loss, a state of its own. And what plain
torch makes of it on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.integration.moving_buffers import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    NUM_SAMPLES,
    NUM_STEPS,
    SPEC,
    Rows,
)
from train_fn.samples.sampler import Sampler, key

CLIP = 0.4
DRAWS = -1
"""The number by which what ``after_step`` draws is seeded."""


class Student(nn.Module):
    queue: torch.Tensor
    place: torch.Tensor
    scratch: torch.Tensor
    replaced: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.teacher = nn.Linear(4, 8).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(6, 8))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(8), persistent=False)
        self.register_buffer("replaced", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.tanh(self.body(x))
        hidden = found + 0.1 * self.queue.mean(dim=0) + 0.1 * self.scratch + 0.1 * self.replaced
        return self.head(hidden).squeeze(1), (found - self.teacher(x)).square().sum()


class Telling:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def build_model(self) -> nn.Module:
        return Student()

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Rows(), "val": Rows()}

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)

    def build_scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        """Each factor multiplies the rate that is there: no function of the step alone."""
        schedulers = torch.optim.lr_scheduler
        chained = schedulers.MultiStepLR(optimizer, milestones=[2, 3, 6], gamma=0.7)
        slower = schedulers.ExponentialLR(optimizer, gamma=1 - 0.5 / total_steps)
        return schedulers.ChainedScheduler([chained, slower])

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor], step: int, *, epoch: int
    ) -> tuple[torch.Tensor, int]:
        found, apart = model(batch["x"])
        pull = 0.02 * step + 0.1 * epoch
        loss = F.mse_loss(found, batch["y"], reduction="sum") + pull * apart
        return loss * (1 + len(self.seen)), len(batch["y"])

    def after_step(self, model: Any, step: int) -> None:
        """As training scripts have it, through ``.data`` as well."""
        for own, other in zip(model.teacher.parameters(), model.body.parameters(), strict=True):
            own.data.mul_(0.8).add_(other.data, alpha=0.2)
        model.head.weight.clamp_(-CLIP, CLIP)
        model.queue[int(model.place)] = model.body.bias + torch.randn(8)
        model.place.copy_((model.place + 1) % len(model.queue))
        model.scratch.add_(model.body.bias * step)
        model.replaced = 0.5 * model.replaced + model.body.bias
        if step % 3 == 2:
            self.seen.append(float(model.head.bias))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Partial(Telling):
    """Updates the teacher on one rank alone."""

    def after_step(self, model: Any, step: int) -> None:
        if torch.distributed.get_rank() == 0:
            super().after_step(model, step)


def plain_run() -> tuple[dict[int, float], nn.Module]:
    """Losses by steps done and the final model of a plain loop over whole global batches."""
    torch.manual_seed(key(SPEC.train.seed, 6))
    task, rows = Telling(), Rows()
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    scheduler = task.build_scheduler(optimizer, NUM_STEPS)
    sampler = Sampler(NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, SPEC.train.seed)
    losses = {}
    for step in range(NUM_STEPS):
        epoch, k = divmod(step, sampler.steps_per_epoch)
        chosen = torch.tensor(sampler.global_batch(epoch, k))
        optimizer.zero_grad()
        batch = {"x": rows.x[chosen], "y": rows.x[chosen].prod(dim=1)}
        loss, size = task.loss(model, batch, step, epoch=epoch)
        (loss / size).backward()
        optimizer.step()
        torch.manual_seed(key(SPEC.train.seed, step, DRAWS, 2))
        with torch.no_grad():
            task.after_step(model, step)
        scheduler.step()
        losses[step + 1] = float(loss.detach()) / size
    return losses, model
