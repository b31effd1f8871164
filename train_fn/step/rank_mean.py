"""Average gradients over ranks just before an optimizer steps, for tasks that step their optimizers
themselves.

Each rank's loss is a mean over its own samples. A rank's gradients count by its share of the global
batch's samples, so the average is the gradient of the mean over the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from train_fn.errors import BadTask, NonFiniteLoss
from train_fn.step.peers import Peers

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
