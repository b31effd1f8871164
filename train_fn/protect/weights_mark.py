"""Whether a loop has changed trained weights since its last commit, as an evaluation does that
swaps them for an average: such weights must not be left as those of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_SAMPLED = 8
"""Tensors of which the first values are compared: code that writes to ``weight.data`` leaves no
trace in version counters."""
_VALUES = 4


class WeightsMark:
    """Note the trained weights at a commit in microseconds, and compare them when a rank leaves."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = list(weights)
        filled = [weight for weight in self._weights if weight.numel()]
        self._sampled = filled[:: max(1, len(filled) // _SAMPLED)][:_SAMPLED]
        self._versions: list[int] = []
        self._values: list[torch.Tensor] = []

    def note(self) -> None:
        """Take the present weights as those of the commit."""
        self._versions = [weight._version for weight in self._weights]
        self._values = [_first(weight).clone() for weight in self._sampled]

    def seems_changed(self) -> bool:
        """Return the same as ``has_changed``, but look at no values that are on a GPU: each step
        would wait for them."""
        if any(value.is_cuda for value in self._values):
            return self._versions != [weight._version for weight in self._weights]
        return self.has_changed()

    def has_changed(self) -> bool:
        """Return whether weights are others than at the last commit, as far as the mark shows."""
        if self._versions != [weight._version for weight in self._weights]:
            return True
        return not all(
            torch.equal(value, _first(weight))
            for value, weight in zip(self._values, self._sampled, strict=True)
        )


def _first(weight: torch.Tensor) -> torch.Tensor:
    row = weight.detach()
    while row.dim() > 1:
        row = row[0]
    return row.reshape(-1)[:_VALUES]
