"""Tasks whose model is sharded, for ranks of the tests. Each function changes its own process
only."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everstep.spec.run_spec import RunSpec
from tests.integration.trainees import Lines, Regression
from train_fn.loop import build

NUM_SAMPLES, VALIDATION = 90, 300
"""Of 300 validation samples there are three micro-batches, so not all of two ranks' are alike."""


class Net(nn.Module):
    """Some tensors have fewer rows than there are ranks, some are not divisible; one is frozen, one
    is tied, and BatchNorm changes buffers in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 30), nn.LayerNorm(30), nn.Tanh(), nn.Dropout(0.1))
        self.norm = nn.BatchNorm1d(30)
        self.one, self.two = nn.Linear(30, 30), nn.Linear(30, 30, bias=False)
        self.two.weight = self.one.weight
        self.last = nn.Linear(30, 1)
        self.inner[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.inner(x))
        return self.last(self.two(torch.tanh(self.one(x))))


class Sharded(Regression):
    def build_model(self) -> nn.Module:
        return Net()

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Lines(num_samples=NUM_SAMPLES), "val": Lines(num_samples=VALIDATION)}

    def shard_modules(self, model: Net) -> list[nn.Module]:
        return [model.inner, model.last]

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        with torch.no_grad():
            for value in model.parameters():
                value.mul_(0.999)


class LeavingApart(Sharded):
    """Its hook changes weights on the second half of the ranks only."""

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        if 2 * torch.distributed.get_rank() >= torch.distributed.get_world_size():
            super().on_epoch_end(model, epoch, metrics)


class Alone(Sharded):
    """Its hook does something on rank 0 only."""

    def __init__(self, done: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self._done = done

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        if torch.distributed.get_rank() == 0:
            self._done(model)


class GatheringAnother(Sharded):
    """Its hook gathers one of two weights of equal size, another one on rank 0."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))

    def shard_modules(self, model: Any) -> list[nn.Module]:
        return []

    def on_epoch_end(self, model: Any, epoch: int, metrics: dict[str, float]) -> None:
        model[int(torch.distributed.get_rank() > 0)].weight.full_tensor()


def calling_alone() -> None:
    build.build_task = lambda spec: Alone(lambda model: model(torch.zeros(2, 4)))


def gathering_alone() -> None:
    build.build_task = lambda spec: Alone(lambda model: next(model.parameters()).full_tensor())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, skipped: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = layer(x)
        found: torch.Tensor = self.last(x)
        return found


class Skipping(Sharded):
    """From step 2 on, rank 0 leaves out a layer, and rank 1 another one of the same size."""

    def build_model(self) -> nn.Module:
        return Layers()

    def shard_modules(self, model: Any) -> list[nn.Module]:
        return list(model.layers)

    def loss(  # type: ignore[override]
        self, model: Any, batch: dict[str, torch.Tensor], step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        skipped = torch.distributed.get_rank() if step >= 2 and model.training else -1
        errors = model(batch["x"], skipped).squeeze(1) - batch["y"]
        return errors.square().sum(), torch.tensor(float(len(errors)))


class OnceMore(Skipping):
    """Rank 0 makes a pass more than the others, from a step on, or to evaluate only."""

    def __init__(self, step: int, *, trains: bool = True) -> None:
        super().__init__()
        self._step, self._trains = step, trains

    def loss(  # type: ignore[override]
        self, model: Any, batch: dict[str, torch.Tensor], step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_alone = torch.distributed.get_rank() == 0 and step >= self._step
        if is_alone and model.training is self._trains:
            with torch.no_grad():
                model(batch["x"], -1)
        return super().loss(model, batch, -1)


def once_more() -> None:
    build.build_task = lambda spec: OnceMore(0)


def once_more_at_step_1() -> None:
    build.build_task = lambda spec: OnceMore(1)


def once_more_to_evaluate() -> None:
    build.build_task = lambda spec: OnceMore(0, trains=False)


class Hidden:
    """What torch does not look into for tensors."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Hiding(Sharded):
    """Its only gathered module, the model, returns an object of its own."""

    def build_model(self) -> nn.Module:
        class Wrapped(Net):
            def forward(self, x: torch.Tensor) -> Any:
                return Hidden(super().forward(x))

        return Wrapped()

    def shard_modules(self, model: Net) -> list[nn.Module]:
        return []

    def loss(  # type: ignore[override]
        self, model: Any, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().loss(lambda x: model(x).value, batch)  # type: ignore[arg-type]


class Routed(nn.Module):
    """Each sample is for one of three experts, by its first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] * 2).long().clamp(-1, 1) + 1
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                x = x.index_add(0, rows, expert(x[rows]).to(x.dtype))  # of autocast
        return x


class Routing(Sharded):
    def build_model(self) -> nn.Module:
        return nn.Sequential(Routed(), Routed(), nn.Linear(4, 1))

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        """On all ranks, call the model and gather norms of its weights."""
        super().on_epoch_end(model, epoch, metrics)
        found = [model(torch.ones(2, 4)).sum(), *(each.norm() for each in model.parameters())]
        assert all(getattr(each, "full_tensor", each.clone)().isfinite() for each in found)

    def shard_modules(self, model: Any) -> list[nn.Module]:
        return [model[0], model[1]]


class Keeping(Sharded):
    """Penalises weights that it has kept since it built them."""

    def build_model(self) -> nn.Module:
        model = Net()
        self.kept = [model.inner[0].weight]
        return model


class Penalising(Sharded):
    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum, weight = super().loss(model, batch)
        return loss_sum + sum(value.square().sum() for value in model.parameters()), weight


class ScaledByRows(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.sub_(value.grad, alpha=group["lr"] * float(value.norm()))


class ScalingByRows(Sharded):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return ScaledByRows(model.parameters(), lr=0.01)


def gallery() -> None:
    """The task of the gallery."""
    folder = Path(__file__).parents[2] / "examples" / "gallery"
    sys.path.insert(0, str(folder))
    task = runpy.run_path(str(folder / "sharded_gpt.py"))["ShardedGpt"]
    build.build_task = lambda spec: task(layers=2)


class Still(Sharded):
    """Without dropout, of which a compiled model draws others."""

    def build_model(self) -> nn.Module:
        model = Net()
        model.inner = nn.Sequential(*model.inner[:-1])
        return model


def by_size() -> None:
    class BySize(Sharded):
        shard_modules: Callable[..., Any] = None  # type: ignore[assignment]

    del BySize.shard_modules
    build.build_task = lambda spec: BySize()


def spec(**train: Any) -> RunSpec:
    """Five steps an epoch, whose last one is short; 20 samples are five micro-batches, so that
    ranks accumulate, and one of two or three has fewer."""
    checkpoint = {"every_steps": None, **train.pop("checkpoint", {})}
    return RunSpec.model_validate(
        {
            "name": "sharded",
            "task": {
                "name": "image_classification",
                "model": {"name": "mini_resnet"},
                "data": {"name": "digits"},
            },
            "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.01},
            "schedule": {"name": "cosine", "warmup_steps": 3},
            "train": {
                "epochs": 3,
                "global_batch_size": 20,
                "micro_batch_size": 4,
                "grad_clip_norm": 0.5,
                "ema_decay": 0.8,
                "sharding": "full",
                "loader": {"num_workers": 0},
                **train,
            },
            "checkpoint": checkpoint,
        }
    )
