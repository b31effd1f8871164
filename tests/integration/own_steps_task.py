"""A GAN as a task that makes its own steps, and what plain torch makes of it on one rank."""

from __future__ import annotations

import io
import os
import runpy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from everstep.spec.run_spec import RunSpec
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.integration.moving_buffers import SPEC as BASE
from train_fn.loop import build
from train_fn.samples.sampler import Sampler, key

NUM_SAMPLES, GLOBAL_BATCH, NUM_STEPS = 53, 12, 11
"""The fifth global batch of an epoch has five samples: two ranks share them as three and two, and a
third rank has none."""


class Points(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


class Gan:
    """Trains a critic twice and a generator once in every step."""

    noise = True
    norm: type[nn.Module] = nn.BatchNorm1d

    def build_model(self) -> nn.Module:
        generator = nn.Sequential(nn.Linear(3, 8), self.norm(8), nn.ReLU(), nn.Linear(8, 4))
        critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        return nn.ModuleDict({"generator": generator, "critic": critic})

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Points(), "val": Points()}

    def build_optimizer(self, model: Any) -> dict[str, torch.optim.Optimizer]:
        return {
            "critic": torch.optim.AdamW(model["critic"].parameters(), 1e-2),
            "generator": torch.optim.SGD(model["generator"].parameters(), 1e-2, momentum=0.9),
        }

    def latent(self, real: torch.Tensor) -> torch.Tensor:
        return torch.randn(len(real), 3) if self.noise else real[:, :3].roll(1, dims=1)

    def training_step(
        self, model: Any, batch: torch.Tensor, step: int, optimizers: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        generator, critic = model["generator"], model["critic"]
        for _ in range(2):
            optimizers["critic"].zero_grad()
            fake = generator(self.latent(batch)).detach()
            loss = F.softplus(-critic(batch)).mean() + F.softplus(critic(fake)).mean()
            loss.backward()
            optimizers["critic"].step()
        optimizers["generator"].zero_grad()
        fooled = F.softplus(-critic(generator(self.latent(batch)))).mean()
        fooled.backward()
        optimizers["generator"].step()
        return {"loss": loss, "fooled": fooled}

    def metrics(self, model: Any, batch: torch.Tensor) -> dict[str, Any]:
        return {"score": (model["critic"](batch).sum(), len(batch))}


class QuietGan(Gan):
    """Draws nothing and sees no batch as a whole, so that it trains alike at every world size."""

    noise = False

    norm = nn.LayerNorm


SPEC = RunSpec.model_validate(
    BASE.model_dump()
    | {
        "train": BASE.train.model_dump()
        | {
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": "auto",
            "epochs": 3,
            "max_steps": NUM_STEPS,
        },
        "checkpoint": BASE.checkpoint.model_dump() | {"best_metric": "score"},
    }
)


class Uneven(QuietGan):
    """Steps its optimizers in another order on one rank. They hold as many numbers."""

    def build_model(self) -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(4, 4) for name in ("generator", "critic")})

    def latent(self, real: torch.Tensor) -> torch.Tensor:
        return real.roll(1, dims=1)

    def training_step(
        self, model: Any, batch: torch.Tensor, step: int, optimizers: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        if step == 2 and torch.distributed.get_rank() == 1:
            optimizers = {"critic": optimizers["generator"], "generator": optimizers["critic"]}
        return super().training_step(model, batch, step, optimizers)


def weights_of(run_dir: RunDir) -> dict[str, torch.Tensor]:
    """The newest checkpoint's."""
    store = CheckpointStore(run_dir)
    weights: dict[str, torch.Tensor] = torch.load(
        io.BytesIO(store.read_file(store.list()[-1].name, "model.pt"))
    )
    return weights


def _task_of_gallery() -> Any:
    """Return the task of the gallery."""
    path = Path(__file__).parents[2] / "examples" / "gallery" / "gan_task.py"
    return runpy.run_path(str(path))["Gan"]()


TASKS: dict[str, Callable[[], Any]] = {
    "gan": Gan,
    "quiet": QuietGan,
    "uneven": Uneven,
    "example": _task_of_gallery,
}


def __getattr__(name: str) -> Callable[[], None]:
    """Return the setup that trains one of TASKS, as ``gan``, or also ends a rank beside an
    optimizer's step: ``gan_killed_1_17_before`` ends rank 1 before its 17th."""
    task, _, killed = name.partition("_killed_")
    if task not in TASKS:
        raise AttributeError(name)

    def setup() -> None:
        build.build_task = lambda spec: TASKS[task]()
        if killed:
            rank, update, place = killed.split("_")
            _die_at(int(rank), int(update), place)

    return setup


def _die_at(rank: int, update: int, place: str) -> None:
    num_updates = 0

    def hook(*_: Any) -> None:
        nonlocal num_updates
        num_updates += 1
        if num_updates == update and torch.distributed.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    register = {
        "before": register_optimizer_step_pre_hook,
        "after": register_optimizer_step_post_hook,
    }[place]
    register(hook)


def plain_run() -> tuple[list[float], nn.Module]:
    """Return the critic's loss of every step, and the model, of a quiet GAN in plain torch."""
    task, points = QuietGan(), Points()
    torch.manual_seed(key(SPEC.train.seed, 6))
    model = task.build_model()
    optimizers = task.build_optimizer(model)
    losses = []
    for chosen in _batches():
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        values = task.training_step(model, points.x[chosen], len(losses), optimizers)
        losses.append(float(values["loss"].detach()))
    return losses, model


def _batches() -> Iterator[torch.Tensor]:
    sampler = Sampler(NUM_SAMPLES, GLOBAL_BATCH, GLOBAL_BATCH, SPEC.train.seed)
    for step in range(NUM_STEPS):
        yield torch.tensor(sampler.global_batch(*divmod(step, sampler.steps_per_epoch)))
