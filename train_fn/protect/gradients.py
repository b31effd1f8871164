"""What a commit without an optimizer step means: a step that was left out is fine, gradients that
are still being added up are not, as no state holds them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from train_fn.errors import BadTask
from train_fn.protect.arguments import Parts
from train_fn.protect.loop_state import LoopState

_LOOKED_AT = 8


class Gradients:
    """Look at a loop's gradients and optimizers when it commits."""

    def __init__(self, state: LoopState) -> None:
        parts = state.parts
        self._state, self._parts = state, parts
        self._scalers = [
            name for name, each in parts.others.items() if isinstance(each, torch.amp.GradScaler)
        ]
        self._num_weights = _num_weights(parts)
        self._used: list[tuple[int, int]] = []
        """Marks of the gradients that an earlier commit has used."""

    def require_used(self, num_updates: int) -> None:
        """Raise BadTask if a commit leaves gradients or weights behind.

        Args:
            num_updates: optimizer steps since the commit before.
        """
        if (now := _num_weights(self._parts)) != self._num_weights:
            raise BadTask(refused_groups(self._num_weights, now))
        marks = [
            (id(weight.grad), weight.grad._version)
            for weight in self._parts.optimized()
            if weight.grad is not None
        ][:_LOOKED_AT]
        used, self._used = self._used, marks
        if num_updates:
            return
        if self._state.weights_have_changed():
            raise BadTask(
                f"step {self._state.step + 1} changed the trained weights, but no optimizer that "
                f"es.protect was given has stepped. {self._who_steps()}"
            )
        if marks in ([], used) or self._state.changed_parts(self._scalers):
            return
        if any(
            bool(weight.grad.any()) for weight in self._parts.optimized() if weight.grad is not None
        ):
            raise BadTask(
                f"state.step() was called for step {self._state.step + 1} while gradients are "
                "being added up: no state holds them, so a restart would lose them. Call it only "
                "after optimizer.step(): with es.loader(DataLoader), once for several batches; "
                "with es.loader(dataset), raise global_batch_size and cut the batch in the loop. "
                "If the step was left out on purpose, call optimizer.zero_grad() before"
            )

    def _who_steps(self) -> str:
        """Return which optimizer to pass: often one that the given one holds, as SAM's base."""
        inner = [
            f"{prefix}{name}"
            for prefix, optimizer in self._parts.optimizers.items()
            for name, value in vars(optimizer).items()
            if isinstance(value, torch.optim.Optimizer)
        ]
        if inner:
            return f"It holds another one: pass that, optimizer.{inner[0]}, with torn='shadow'"
        return (
            "Pass the optimizer whose step() the loop calls, and do not put another one in its "
            "place"
        )


def _num_weights(parts: Parts) -> dict[str, int]:
    return {
        name: sum(len(group["params"]) for group in optimizer.param_groups)
        for name, optimizer in parts.optimizers.items()
    }


def refused_groups(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Return the error for an optimizer that got other weights."""
    name = next(name for name in before if before[name] != now[name])
    return (
        f"the optimizer{name and f' {name!r}'} holds {now[name]} weights instead of "
        f"{before[name]} when the loop began, so no restart could load its state. Build it with "
        "all weights that are ever trained, and let requires_grad_() say which are at present"
    )
