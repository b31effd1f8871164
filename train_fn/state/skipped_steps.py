"""Count the steps that fp16's loss scaler skipped because gradients were not finite. Raise an error
if no other step succeeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from train_fn.errors import NothingTrained
from train_fn.state.sound_state import not_finite

MOST_IN_A_ROW = 30
"""Limit on consecutive skipped steps. Each halves the scale, so a scale may start 2**30 times too
high. GradScaler starts at 2**16."""
LEAST_SCALE = 2.0**-14
"""Below this scale, scaled gradients underflow in fp16, so scaling no longer helps."""


class SkippedSteps:
    """Count skipped steps, as part of the training state. A skipped step has used its samples: the
    position in the data and the schedule still advance."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0

    def note(self, scaler: torch.amp.GradScaler, scale_before: float) -> bool:
        """Count a step after the scaler's update, and return whether it was skipped. A scaler
        lowers its scale exactly when it skips a step."""
        scale = scaler.get_scale()
        skipped = scale < scale_before or scale == 0
        self.total += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        return skipped

    def check(
        self,
        step: int,
        scaler: torch.amp.GradScaler,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        last: bool,
    ) -> None:
        """Raise NothingTrained if steps keep being skipped, and name the gradients that are not
        finite. Call this after a skipped step.

        Args:
            step: steps done.
            named: parameters with the gradients of the step.
            last: whether the run has no further step.
        """
        scale = scaler.get_scale()
        if (
            self.in_a_row < MOST_IN_A_ROW
            and scale >= LEAST_SCALE
            and not (last and self.total == step)
        ):
            return
        names = not_finite({name: value.grad for name, value in named if value.grad is not None})
        raise NothingTrained(step, self.total, self.in_a_row, scale, names)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.in_a_row = state["total"], state["in_a_row"]
