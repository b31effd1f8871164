"""Models that need care at several ranks: lazy layers, and negatives from all ranks' samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather

from tests.integration.moving_buffers import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    NUM_SAMPLES,
    NUM_STEPS,
    SPEC,
    Rows,
)
from train_fn.loop import build
from train_fn.samples.sampler import Sampler, key


class LazyTask:
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Rows(), "val": Rows()}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        found = model(batch["x"]).squeeze(1)
        return F.mse_loss(found, batch["y"], reduction="sum"), len(batch["y"])


class Clip(nn.Module):
    """Tells each sample's two views from those of all other samples in the ranks' micro-batches."""

    exchanges_in_forward = True

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 8), nn.Linear(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = F.normalize(self.one(x[:, :2])), F.normalize(self.other(x[:, 2:]))
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        count = torch.tensor([len(x)])
        counts = [torch.zeros_like(count) for _ in range(size)]
        torch.distributed.all_gather(counts, count)
        longest = max(int(each) for each in counts)
        padded = F.pad(other, (0, 0, 0, longest - len(x)))
        pairs = zip(all_gather(padded), counts, strict=True)
        others = torch.cat([each[: int(length)] for each, length in pairs])
        begin = sum(int(each) for each in counts[:rank])
        wanted = begin + torch.arange(len(x))
        return F.cross_entropy(one @ others.T / 0.1, wanted, reduction="sum")


class ClipTask(LazyTask):
    def build_model(self) -> nn.Module:
        return Clip()

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Rows(), "val": None}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return model(batch["x"]), len(batch["x"])


def clip_task() -> None:
    build.build_task = lambda spec: ClipTask()


def plain_lazy_run() -> dict[int, float]:
    """Losses by steps done of a plain loop, whose first pass shapes the model."""
    task, rows = LazyTask(), Rows()
    model = task.build_model()
    sampler = Sampler(NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, SPEC.train.seed)
    torch.manual_seed(key(SPEC.train.seed, 11))
    model(rows.x[:1])
    optimizer = torch.optim.SGD(model.parameters(), lr=SPEC.optimizer.lr)
    losses = {}
    for step in range(NUM_STEPS):
        chosen = torch.tensor(sampler.global_batch(*divmod(step, sampler.steps_per_epoch)))
        optimizer.zero_grad()
        loss, size = task.loss(model, {"x": rows.x[chosen], "y": rows.x[chosen].prod(dim=1)})
        (loss / size).backward()
        optimizer.step()
        losses[step + 1] = float(loss.detach()) / size
    return losses
