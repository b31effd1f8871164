"""The step of a task that makes it itself: ``training_step(model, batch, step, optimizers)``.

The task runs its own forward and backward passes over this rank's share of the global batch, and
steps one or more optimizers, as a GAN does. Each of their steps is a collective, so a rank may die
when others have changed their weights. So the state is copied before the step, and a rank that
fails within it leaves the copy. The gate and the commit are those of any other task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from train_fn.checks.check import Checks, Moment
from train_fn.checks.returns import checked_values
from train_fn.errors import BadTask, NonFiniteLoss
from train_fn.state.optim import Optimizers, each_of
from train_fn.state.run_state import StateCopies
from train_fn.state.train_state import TrainState
from train_fn.step.buffers import MovingBuffers
from train_fn.step.peers import Peers
from train_fn.step.untrained import untrained_places
from train_fn.tasks.protocol import LOSS, METHOD, Task, where


class OwnUpdates:
    """Call ``training_step`` of one replica's task.

    Args:
        checks: made around each step.
        max_norm: clips each optimizer's gradients, averaged over ranks; None for never.
    """

    def __init__(
        self, task: Task, state: TrainState, checks: Checks, peers: Peers, max_norm: float | None
    ) -> None:
        self.source = where(task, METHOD)
        self._task: Any = task
        self._checks, self._peers = checks, peers
        self._optimizers = (
            state.optimizer.by_name if isinstance(state.optimizer, Optimizers) else state.optimizer
        )
        self.mean = RankMean(each_of(state.optimizer), peers, max_norm, self.source)
        self.before = StateCopies(state, keeps_older=False)
        """Holds the state with which the present step began."""
        self.lr: float | None = 0.0
        """The learning rate of the present step."""
        self.values: dict[str, float | None] = {}
        """Metrics of the step over all ranks, beside its loss."""
        self._names: list[str] | None = None

    def changed_by(self, state: TrainState, trained: Sequence[nn.Parameter]) -> MovingBuffers:
        """Return what may change in a step, which counts as one forward pass: any buffer of the
        model. No step is tried before the first one: it would change the optimizers."""
        places = untrained_places(state.model, trained)
        buffers = [number for number, place in enumerate(places) if place.is_buffer]
        return MovingBuffers(places, buffers, (), self._peers, state.carry)

    @property
    def has_loss(self) -> bool:
        """Return whether the steps report a loss."""
        return LOSS in (self._names or ())

    def measured(self) -> dict[str, float | None]:
        """Return the step's metrics beside its loss: those of the task over all ranks, and the
        gradients' norms before they were clipped."""
        norms = {f"grad_norm{name and f'_{name}'}": each for name, each in self.mean.norms.items()}
        return {**norms, **self.values}

    def run(self, state: TrainState, batch: Any) -> dict[str, torch.Tensor]:
        """Let the task make its step, and return its metrics on this rank. Raises BadTask."""
        with self._checks.around(Moment.LOSS, self.source):
            values = checked_values(
                self._task,
                self._task.training_step(state.model, batch, state.step, self._optimizers),
            )
            self.mean.end()
        if not self.mean.num_updates:
            raise BadTask(
                f"{self.source} stepped no optimizer: call backward() and then step() of each "
                "optimizer that it is given"
            )
        self._agree_on_names(list(values))
        return values

    def _agree_on_names(self, names: list[str]) -> None:
        """Require the same metrics on all ranks and in every step. A collective in the first
        step."""
        if self._names is None:
            of_ranks = self._peers.gather(names)
            self._names = of_ranks[0]
        if names != self._names:
            raise BadTask(
                f"{self.source} returned the metrics {names}, where rank 0 returned {self._names} "
                "in the first step; return the same on every rank and in every step"
            )


# ---------------------------------------------------------------- mean over ranks

# Each rank's loss is a mean over its own samples. A rank's gradients count by its share of the
# global batch's samples, so the average is the gradient of the mean over the global batch.

_PLACES = 1 << 12
"""Updates are told apart modulo this, so that float32 holds their sum over ranks."""


class RankMean:
    """Hook into the steps of several optimizers. A step of each is a collective, so all ranks make
    the same ones in the same order.

    Args:
        optimizers: by name; the name of a single one is empty.
        max_norm: clips the averaged gradients of an optimizer to this norm; None for never.
        source: the method that makes the steps, for errors.
    """

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        peers: Peers,
        max_norm: float | None,
        source: str,
    ) -> None:
        self._names, self._peers = list(optimizers), peers
        self._max_norm, self._source = max_norm, source
        self._step, self._weight, self._is_open = 0, 1.0, False
        self.num_updates = 0
        """Optimizer steps since ``begin``."""
        self.norms: dict[str, float] = {}
        """The gradients' norm before it was clipped, by optimizer, in its last step."""
        self._hooks = [
            optimizer.register_step_pre_hook(partial(self._before_update, number))
            for number, optimizer in enumerate(optimizers.values())
        ]

    def remove_hooks(self) -> None:
        """Leave the optimizers as they were built."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, step: int, weight: float) -> None:
        """Begin the step after ``step`` steps done. ``weight`` is this rank's part of the global
        batch: all ranks' add up to 1."""
        self._step, self._weight, self._is_open = step, weight, True
        self.num_updates, self.norms = 0, {}

    def end(self) -> None:
        """Let no optimizer step until the next ``begin``."""
        self._is_open = False

    def _before_update(self, number: int, optimizer: Any, args: Any, kwargs: Any) -> None:
        name = self._names[number]
        if not self._is_open:
            raise BadTask(
                f"an optimizer steps outside of {self._source}: gradients are averaged over ranks "
                "there only. Move the step into it"
            )
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise BadTask(
                f"{self._source} calls step(closure), which computes gradients after they were "
                "averaged over ranks. Call backward() first, then step()"
            )
        parameters = [value for group in optimizer.param_groups for value in group["params"]]
        if any(value.grad is not None and value.grad.is_sparse for value in parameters):
            raise BadTask(
                f"{self._source} has sparse gradients, which cannot be averaged over ranks here: "
                "make the embedding with sparse=False"
            )
        place = (self.num_updates * len(self._names) + number) % _PLACES
        self.num_updates += 1
        if not self._peers.alone:
            self._average(parameters, place, name)
        if self._max_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._max_norm))
            if not math.isfinite(norm):
                raise NonFiniteLoss(self._step, None, norm, self._source, what="gradient norm")
            self.norms[name] = norm

    @torch.no_grad()
    def _average(self, parameters: Sequence[torch.Tensor], place: int, name: str) -> None:
        """Replace gradients by their weighted sum over ranks; one that no rank has stays None. A
        collective."""
        has_one = [value.grad is not None for value in parameters]
        marks = torch.tensor([place, *has_one], dtype=torch.float32, device=self._peers.device)
        parts: dict[torch.dtype, list[torch.Tensor]] = {torch.float32: [marks]}
        for value in parameters:
            gradient = _real(torch.zeros_like(value) if value.grad is None else value.grad)
            scaled = gradient.reshape(-1) * self._weight
            parts.setdefault(gradient.dtype, []).append(scaled)
        flats = {dtype: torch.cat(each) for dtype, each in parts.items()}
        works = [self._peers.start_sum(flat) for flat in flats.values()]
        for work in works:
            if work is not None:
                work.wait()
        found, *uses = self._peers.result(flats[torch.float32][: len(marks)]).tolist()
        if found != place * self._peers.world_size:
            raise BadTask(
                f"{self._source}: the ranks do not step the same optimizers in the same order; "
                f"this rank is at update {self.num_updates} of step {self._step + 1}"
                f"{name and f', of optimizer {name!r}'}. Let no rank, and nothing that only a "
                "rank's own samples say, decide which optimizer steps"
            )
        begun = {dtype: 0 for dtype in flats} | {torch.float32: len(marks)}
        for value, used in zip(parameters, uses, strict=True):
            real = _real(value)
            start = begun[real.dtype]
            begun[real.dtype] = start + real.numel()
            if not used:
                continue
            if value.grad is None:
                value.grad = torch.empty_like(value)
            total = flats[real.dtype][start : start + real.numel()]
            _real(value.grad).copy_(total.view(real.shape))


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value) if value.is_complex() else value
