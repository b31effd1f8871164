"""Choose which value a step commits for each tensor that forward passes change.

- ``mean``: the mean of the values after each micro-batch, weighted by its samples. So running
  statistics take one momentum update a step, and ``num_batches_tracked`` counts steps.
- ``first``: the value after the global batch's first micro-batch. It is used where a mean has no
  meaning: for integers and booleans, for buffers in the same module as these (a queue and its
  pointer), and for parameters that are not trained (a teacher's).

A module chooses for all of its tensors by an attribute ``buffers_take = "mean"`` or ``"first"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch.nn.modules.batchnorm import _NormBase

from train_fn.errors import BadTask
from train_fn.step.untrained import Place, present

Rule = Literal["mean", "first"]


def rules_of(places: Sequence[Place], others: Sequence[Place] = ()) -> list[Rule]:
    """Return which value the step commits for each of ``places``.

    This depends on what else changes in a tensor's module, among ``places`` and ``others``. Raise
    BadTask for a module whose ``buffers_take`` is neither 'mean' nor 'first'.
    """
    counting = {place.module for place in (*places, *others) if not _is_number(place)}
    rules: list[Rule] = []
    for place in places:
        asked = getattr(place.module, "buffers_take", None)
        if asked not in (None, "mean", "first"):
            raise BadTask(
                f"buffers_take of {type(place.module).__name__} is {asked!r}; it is 'mean' or "
                "'first'"
            )
        if asked == "mean" and not present(place).is_complex() and _is_number(place):
            rules.append("mean")
        else:
            meant = (
                asked is None
                and place.is_buffer
                and _is_number(place)
                and place.module not in counting
            )
            rules.append("mean" if meant else "first")
    return rules


def _is_number(place: Place) -> bool:
    """Return whether a mean of the tensor's values has a meaning by itself. It has for real
    numbers, and for BatchNorm's count, which every pass increases by one."""
    is_count = place.key == "num_batches_tracked" and isinstance(place.module, _NormBase)
    return present(place).is_floating_point() or is_count
