"""A fingerprint of what a rank's kernels compute: the loss and gradients of the run's first
micro-batch on its initial weights.

Every rank of every attempt computes them, so another result means other kernels: another
processor, another library, another number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from train_fn.node.kernels import kernels
from train_fn.step.word_sums import word_sum

NOT_COMPARED = 0
"""In place of a number of ranks: gradients that other weights were part of."""


@dataclass(frozen=True)
class Numerics:
    """Hold the fingerprint of one rank."""

    loss: str
    """The exact loss of the micro-batch, in hexadecimal."""
    gradients: str
    """Digest of its gradients."""
    world_size: int
    """Ranks over which these gradients are a mean; 1 if they are this rank's alone, and
    NOT_COMPARED if ranks computed them on other weights."""
    kernels: str
    """What is known to decide between kernels (``node.kernels``)."""

    def differences(self, other: Numerics) -> list[str]:
        """Return what ``other`` computed differently, in words; nothing if all is equal. Gradients
        are not compared if they are means over other numbers of ranks."""
        found = ["the loss"] if self.loss != other.loss else []
        is_alike = self.world_size == other.world_size != NOT_COMPARED
        if is_alike and self.gradients != other.gradients:
            found.append("the gradients")
        return found

    def unlike(self, other: Numerics) -> list[str]:
        """Return what is known about the kernels of ``other``, and does not hold for this one."""
        own = self.kernels.split(", ")
        return [part for part in other.kernels.split(", ") if part not in own]

    def dump(self) -> dict[str, Any]:
        """Return the fingerprint as plain values."""
        return asdict(self)


def numerics_of(
    loss: torch.Tensor, parameters: Iterable[torch.Tensor], world_size: int
) -> Numerics:
    """Return the fingerprint after the first backward pass.

    Args:
        world_size: ranks over which the gradients are a mean.
    """
    gradients = [
        "none" if value.grad is None else str(word_sum(value.grad.to_dense()))
        for value in parameters
    ]
    return Numerics(
        float(loss).hex(),
        hashlib.sha256(" ".join(gradients).encode()).hexdigest(),
        world_size,
        kernels(loss.device),
    )
