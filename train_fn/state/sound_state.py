"""Check a state before it is saved, published as a snapshot or resumed from. It must consist of
complete steps and hold finite weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from train_fn.errors import NonFiniteWeights, StateNotWhole
from train_fn.samples.sampler import Sampler


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
    expected = sampler.samples_before(state["k"]) if closed else sampler.num_samples
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
