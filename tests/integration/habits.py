"""Tasks with habits of users' code: what they keep in a process, and where.

A setup is named after its habits: ``habits.cached_group__own_group`` has both. What a habit keeps
decides a factor of the loss, so that a stale one changes every bit of the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.integration.trainees import Regression
from train_fn.loop import replica


class Habit:
    """What user code does beside training. Every method may do nothing."""

    def build(self, task: Any) -> None:
        """While the model is built."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer; None for the spec's."""
        return None

    def factor(self, task: Any, model: nn.Module) -> float:
        """A factor of the loss."""
        return 1.0

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        """On all ranks."""


@functools.lru_cache
def world() -> Any:
    return dist.group.WORLD


@functools.lru_cache
def size() -> int:
    return dist.get_world_size()


def gather(group: Any) -> None:
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, "mine", group=group)
    assert found == ["mine"] * len(found)


class CachedGroup(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        gather(world())


class OwnGroup(Habit):
    def build(self, task: Any) -> None:
        task.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        if task.group is not None:
            gather(task.group)


class GuardedBarrier(Habit):
    """Rank 0 prepares, and the others wait."""

    def build(self, task: Any) -> None:
        if dist.is_initialized():
            dist.barrier()


class RankOfBuild(Habit):
    def build(self, task: Any) -> None:
        task.rank = dist.get_rank()

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.125 * task.rank


class CachedSize(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.125 * size()


class CountingSgd(torch.optim.SGD):
    """Its step size falls with its own count of calls."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.calls**-0.5)


class OptimizerCount(Habit):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return CountingSgd(model.parameters())


class TorchsAttribute(Habit):
    """Anneals a dropout's rate in place."""

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p *= 0.5


HABITS: dict[str, type[Habit]] = {
    "cached_group": CachedGroup,
    "own_group": OwnGroup,
    "guarded_barrier": GuardedBarrier,
    "rank_of_build": RankOfBuild,
    "cached_size": CachedSize,
    "optimizer_count": OptimizerCount,
    "torchs_attribute": TorchsAttribute,
}
KNOWN = ("optimizer_count", "torchs_attribute")
"""Habits with which a process stays: what they change is put back."""


class Habitual(Regression):
    """A task with habits."""

    def __init__(self, habits: list[Habit]) -> None:
        super().__init__()
        self._habits = habits

    def build_model(self) -> nn.Module:
        for habit in self._habits:
            habit.build(self)
        return super().build_model()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        found = [habit.optimizer(model) for habit in self._habits]
        return next(filter(None, found), torch.optim.SGD(model.parameters(), lr=0.01))

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum, weight = super().loss(model, batch)
        for habit in self._habits:
            loss_sum = loss_sum * habit.factor(self, model)
        return loss_sum, weight

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        for habit in self._habits:
            habit.epoch_end(self, model)


def __getattr__(name: str) -> Callable[[], None]:
    """Return the setup of a task with the habits in ``name``."""
    if not set(name.split("__")) <= set(HABITS):
        raise AttributeError(name)

    def set_up() -> None:
        replica.build_task = lambda spec: Habitual([HABITS[each]() for each in name.split("__")])

    return set_up
