"""Check a state before it is saved, published as a snapshot or resumed from. It must consist of
complete steps and hold finite weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from train_fn.errors import NonFiniteWeights, StateNotWhole
from train_fn.node.device import kernels
from train_fn.samples.sampler import Sampler
from train_fn.step.fingerprints import local, word_sum


def require_sound(
    state: Mapping[str, Any], sampler: Sampler | None, trained: Collection[str]
) -> None:
    """Check a state as returned by ``TrainState.state_dict``. This takes one pass over the weights,
    on their device.

    Args:
        sampler: None if the number of samples in the steps is not known.
        trained: names of the parameters that are trained. Other parameters, and buffers, may hold
            any values.

    Raises:
        StateNotWhole: its ledger does not account for all samples of the steps that it counts.
        NonFiniteWeights: a parameter holds NaN or infinity.
    """
    fault = ledger_fault(state, sampler) if sampler is not None else None
    if fault is not None:
        raise StateNotWhole(state["step"], fault)
    names = not_finite({name: value for name, value in state["model"].items() if name in trained})
    if names:
        raise NonFiniteWeights(state["step"], names)


def ledger_fault(state: Mapping[str, Any], sampler: Sampler) -> str | None:
    """Return how the ledger's counts of the epoch differ from the state's step; None if they agree.

    A sample that the loader left out counts as missing, and one that it yielded instead counts as a
    duplicate. So both are accounted for.
    """
    closed = state["closed_epochs"] >= state["epoch"]
    expected = sampler.num_samples
    if closed:
        expected = sampler.num_before(state["k"])
    ledger = state["ledger"]
    found = ledger["used_once"] + ledger["missing"]
    if found == expected:
        return None
    num_steps = state["k"] or sampler.steps_per_epoch
    return (
        f"its ledger accounts for {found} samples of this epoch, where {num_steps} steps have "
        f"{expected}"
    )


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that hold NaN or infinity. If there are none, this costs one sum
    for each tensor and one number copied to the host."""
    floats = {
        name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()
    }
    if not floats:
        return []
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in floats.values()])
    if math.isfinite(float(sums.sum())):
        return []
    # A sum of finite numbers may overflow, so check the elements.
    return [name for name, tensor in floats.items() if not torch.isfinite(tensor).all()]


# ---------------------------------------------------------------- numerics

# A fingerprint of what a rank's kernels compute: the loss and gradients of the run's first
# micro-batch on its initial weights.
#
# Every rank of every attempt computes them, so another result means other kernels: another
# processor, another library, another number of threads.

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
    micro_batch_size: int | None = None
    """Samples of a micro-batch of that attempt; None in states of earlier versions."""

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
    loss: torch.Tensor,
    parameters: Iterable[torch.Tensor],
    world_size: int,
    micro_batch_size: int | None = None,
) -> Numerics:
    """Return the fingerprint after the first backward pass.

    Args:
        world_size: ranks over which the gradients are a mean.
    """
    gradients = [
        "none" if value.grad is None else str(word_sum(local(value.grad).to_dense()))
        for value in parameters
    ]
    return Numerics(
        float(loss).hex(),
        hashlib.sha256(" ".join(gradients).encode()).hexdigest(),
        world_size,
        kernels(loss.device),
        micro_batch_size,
    )
