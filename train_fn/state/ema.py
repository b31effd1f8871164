"""Exponential moving average of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Ema:
    """A second set of weights that follows the first. Buffers are not averaged: the model's own
    serve both."""

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
        """Follow the weights after a step; ``step`` counts steps done. The decay grows from 0.1, so
        that the start is forgotten."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            list(self._averages.values()), list(self._parameters.values()), 1 - decay
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the averages inside, and with its own weights again after,
        whatever happens."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The average under every name of its parameter: tied weights have several in the model's
        own state, too."""
        return {name: self._averages[first] for name, first in self._names.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the averages of every parameter from ``state``, which may hold more."""
        for name, average in self._averages.items():
            average.copy_(state[name])

    def _swap(self) -> None:
        """Exchange storages: nothing is copied, and views that DDP or the optimizer hold stay those
        of the parameters."""
        for name, parameter in self._parameters.items():
            parameter.data, self._averages[name] = self._averages[name], parameter.data
