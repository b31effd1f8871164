"""Steps that fp16's loss scaler left out because gradients were not finite: counted, and refused
when nothing else happens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from train_fn.errors import NothingTrained
from train_fn.state.sound_state import not_finite

MOST_IN_A_ROW = 30
"""A scale that began too high is halved so often at most: 2**30 times too high, by where GradScaler
begins (2**16) or grows to."""
LEAST_SCALE = 2.0**-14
"""Below it a scaled gradient is smaller than fp16 holds: it is no protection any more."""


class SkippedSteps:
    """Part of the training state. A skipped step has used its samples: the position in the data and
    the schedule move on."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0

    def note(self, scaler: torch.amp.GradScaler, scale_before: float) -> bool:
        """Count the step that the scaler has just been updated for; whether it was left out. A
        scaler backs off exactly then."""
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
        """Raise NothingTrained, with the gradients that are to blame, where steps are left out for
        good. After a skipped step.

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
