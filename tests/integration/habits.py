"""Tasks with habits of users' code: what they keep in a process, and where.

A setup is named after its habits: ``habits.cached_group__own_group`` has both. What a habit keeps
decides a factor of the loss, so that a stale one changes every bit of the run.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
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


COUNTS = {"global": 0}
STEPS = 0
NUMBERS = itertools.count()
OWN_RNG = random.Random(5)


class GlobalCount(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        global STEPS
        STEPS += 1
        return 1.0 + 0.001 * STEPS


class GlobalDict(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        COUNTS["global"] += 1
        return 1.0 + 0.001 * COUNTS["global"]


class TaskCount(Habit):
    def build(self, task: Any) -> None:
        task.passes = 0

    def factor(self, task: Any, model: nn.Module) -> float:
        task.passes += 1
        return 1.0 + 0.001 * task.passes


class DeepCount(Habit):
    """Held three objects away from the task."""

    def build(self, task: Any) -> None:
        task.near = Held(Held(Held(0)))

    def factor(self, task: Any, model: nn.Module) -> float:
        deep = task.near.inner.inner
        deep.inner += 1
        return 1.0 + 0.001 * deep.inner


class Held:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class ClassCount(Habit):
    passes = 0

    def factor(self, task: Any, model: nn.Module) -> float:
        ClassCount.passes += 1
        return 1.0 + 0.001 * ClassCount.passes


def counted(numbers: list[int] = []) -> int:  # noqa: B006 it is the habit
    numbers.append(0)
    return len(numbers)


class DefaultArgument(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * counted()


def _counter() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


closed = _counter()


class Closure(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * closed()


class FunctionAttribute(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
        return 1.0 + 0.001 * counted.calls  # type: ignore[attr-defined]


class GlobalIterator(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * next(NUMBERS)


class GlobalGenerator(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * OWN_RNG.random()


class GlobalRng(Habit):
    """Draws from Python's, which Everstep seeds."""

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        task.drawn = random.random()

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * random.random()


@functools.lru_cache
def first_answer(question: str) -> float:
    return 0.001 * next(NUMBERS)


class Cache(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        task.answer = first_answer("first")

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + getattr(task, "answer", 0.0)


class Environment(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        os.environ["HABIT"] = str(1 + int(os.environ.get("HABIT", "0")))

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * int(os.environ.get("HABIT", "0"))


class Directory(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        os.chdir("/")

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * (Path.cwd() == Path("/"))


class SignalHandler(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        signal.signal(signal.SIGUSR2, _ignore)

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * (signal.getsignal(signal.SIGUSR2) is _ignore)


def _ignore(*_: Any) -> None:
    pass


class Patched(Habit):
    """Replaces a function of torch once it knows enough."""

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        torch.nn.functional.celu = torch.nn.functional.elu

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * (torch.nn.functional.celu is torch.nn.functional.elu)


class Setting(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        torch.set_anomaly_enabled(True, check_nan=False)

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * torch.is_anomaly_enabled()


class Served(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.number, self.asked, self.answered = 0, threading.Event(), threading.Event()

    def run(self) -> None:
        while self.asked.wait():
            self.asked.clear()
            self.number += 1
            self.answered.set()


class OwnThread(Habit):
    """A thread that answers questions, and counts them."""

    def build(self, task: Any) -> None:
        task.served = Served()
        task.served.start()

    def factor(self, task: Any, model: nn.Module) -> float:
        task.served.answered.clear()
        task.served.asked.set()
        assert task.served.answered.wait(60)
        return 1.0 + 0.001 * task.served.number


class OwnChild(Habit):
    def build(self, task: Any) -> None:
        task.child = subprocess.Popen(["sleep", "600"])
        weakref.finalize(task, task.child.kill)


class Stream(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        sys.stdout = io.StringIO()

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * isinstance(sys.stdout, io.StringIO)


HABITS: dict[str, type[Habit]] = {
    "global_count": GlobalCount,
    "global_dict": GlobalDict,
    "task_count": TaskCount,
    "deep_count": DeepCount,
    "class_count": ClassCount,
    "default_argument": DefaultArgument,
    "closure": Closure,
    "function_attribute": FunctionAttribute,
    "global_iterator": GlobalIterator,
    "global_generator": GlobalGenerator,
    "global_rng": GlobalRng,
    "cache": Cache,
    "environment": Environment,
    "directory": Directory,
    "signal_handler": SignalHandler,
    "patched": Patched,
    "setting": Setting,
    "own_thread": OwnThread,
    "own_child": OwnChild,
    "stream": Stream,
    "cached_group": CachedGroup,
    "own_group": OwnGroup,
    "guarded_barrier": GuardedBarrier,
    "rank_of_build": RankOfBuild,
    "cached_size": CachedSize,
    "optimizer_count": OptimizerCount,
    "torchs_attribute": TorchsAttribute,
}
KNOWN = frozenset({"optimizer_count", "torchs_attribute", "task_count", "global_rng"})
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
