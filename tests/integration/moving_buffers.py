"""A model with all kinds of state that forward passes move, and what a step makes of it, worked out
by plain torch on one rank."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from everstep.spec.run_spec import RunSpec
from train_fn.samples.sampler import Sampler

NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, NUM_STEPS = 90, 28, 6, 8
"""A global batch is five micro-batches, the last one of four samples; the fourth of an epoch has
six samples in one."""
SPEC = RunSpec.model_validate(
    {
        "name": "moving",
        "task": {
            "name": "image_classification",
            "model": {"name": "mini_resnet"},
            "data": {"name": "digits"},
        },
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "train": {
            "epochs": NUM_STEPS // 4,
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": MICRO_BATCH,
            "loader": {"num_workers": 0},
        },
        "checkpoint": {"every_steps": 100, "best_metric": "none"},
    }
)


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.x = (
            torch.from_numpy(
                np.random.default_rng(0).normal(size=(NUM_SAMPLES, 4)).astype(np.float32)
            )
            + 0.5
        )

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.x[index].prod()}


class Replaced(nn.Module):
    """Puts another tensor in the place of its buffer, and keeps a mask of the batch's length beside
    it."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
            self.mask = torch.ones(len(x))
        return x - self.mean


class Queue(nn.Module):
    """The last samples, and the place of the oldest, as MoCo has them."""

    samples: torch.Tensor
    pointer: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros(16, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x + 0.1 * self.samples.mean(dim=0)
        if self.training:
            places = (int(self.pointer) + torch.arange(len(x))) % len(self.samples)
            self.samples[places] = x.detach()
            self.pointer[0] = (self.pointer[0] + len(x)) % len(self.samples)
        return found


class Moving(nn.Module):
    """Also a teacher, whose weights follow the student's in every forward pass in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced, self.queue = Replaced(), Queue()
        self.norm, self.cumulative = nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("unsaved", torch.zeros(4), persistent=False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            for own, other in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                own.data = 0.5 * own.data + 0.5 * other.data
            self.unsaved += x.detach().mean(dim=0)  # type: ignore[operator]
        x = self.queue(self.replaced(x))
        x = self.cumulative(self.norm(x)) + 0.1 * self.unsaved
        return self.head(self.student(x) + self.teacher(x)).squeeze(1)


class MovingTask:
    def build_model(self) -> nn.Module:
        return Moving()

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Rows(), "val": Rows()}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


FIRST = ("queue.samples", "queue.pointer", "teacher.weight", "teacher.bias")
"""Of these the value after the first micro-batch is committed, as the documentation has it."""


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those that no state_dict has as well; without the mask, which follows
    from the batch."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in named.items() if name != "replaced.mask"}


def plain_run(model: nn.Module, num_steps: int) -> nn.Module:
    """Train by the documented rule on one rank: every micro-batch on a copy of the model."""
    task, rows, lr = MovingTask(), Rows(), SPEC.optimizer.lr
    sampler = Sampler(NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, SPEC.train.seed)
    for step in range(num_steps):
        indices = sampler.global_batch(*divmod(step, sampler.steps_per_epoch))
        after: list[dict[str, torch.Tensor]] = []
        gradients: list[dict[str, torch.Tensor]] = []
        sizes: list[int] = []
        for begin in range(0, len(indices), MICRO_BATCH):
            chosen = torch.tensor(indices[begin : begin + MICRO_BATCH])
            one = copy.deepcopy(model)
            one.zero_grad()
            loss, size = task.loss(one, {"x": rows.x[chosen], "y": rows.x[chosen].prod(dim=1)})
            (loss / len(indices)).backward()
            after.append(tensors_of(one))
            gradients.append(
                {name: each.grad for name, each in one.named_parameters() if each.grad is not None}
            )
            sizes.append(size)
        with torch.no_grad():
            for name, tensor in tensors_of(model).items():
                if name in gradients[0]:
                    tensor -= lr * sum(each[name] for each in gradients)  # type: ignore[arg-type]
                elif name in FIRST:
                    tensor.copy_(after[0][name])
                else:
                    total = sum(
                        size * each[name].double() for size, each in zip(sizes, after, strict=True)
                    )
                    tensor.copy_((total / len(indices)).to(tensor.dtype))  # type: ignore[union-attr]
    return model


@torch.no_grad()
def plain_val_loss(model: nn.Module) -> float:
    rows = Rows()
    batch = {"x": rows.x, "y": rows.x.prod(dim=1)}
    loss, size = MovingTask().loss(copy.deepcopy(model).eval(), batch)
    return float(loss) / size
