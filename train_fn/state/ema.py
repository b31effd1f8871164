"""Exponential moving average of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Ema:
    """Keep an exponential moving average of the parameters. Buffers are not averaged: both sets of
    weights use the model's own."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self._averages = {
            name: parameter.detach().clone() for name, parameter in self._parameters.items()
        }
        first = {parameter: name for name, parameter in self._parameters.items()}
        self._names = {
            name: first[parameter]
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after a step; ``step`` counts steps done. The decay starts near 0.1
        and grows, so that the initial weights lose their influence."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            list(self._averages.values()), list(self._parameters.values()), 1 - decay
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averages as the model's weights inside the block. Restore its own weights
        afterwards, even on an error."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return each average under every name of its parameter. Tied weights have several names,
        as in the model's own ``state_dict``."""
        return {name: self._averages[first] for name, first in self._names.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load the average of every parameter from ``state``. Ignore other entries."""
        for name, average in self._averages.items():
            average.copy_(state[name])

    def _swap(self) -> None:
        """Swap the storages of weights and averages. Nothing is copied, and DDP and the optimizer
        keep referring to the same parameter objects."""
        for name, parameter in self._parameters.items():
            parameter.data, self._averages[name] = self._averages[name], parameter.data
