"""The metrics that a loop gives to ``state.step``: checked, and the same on every rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from train_fn.errors import BadTask
from train_fn.protect.agreement import MOST_VALUES

Values = dict[str, float | None]


def numbers_of(metrics: Mapping[str, Any]) -> Values:
    """Return metrics as numbers; one that is not finite is None. Raises BadTask."""
    values: Values = {}
    for name, value in metrics.items():
        try:
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise BadTask(
                f"state.step({name}=…) is a {type(value).__name__}; pass a number, or a tensor of "
                "one element"
            ) from None
        values[name] = number if math.isfinite(number) else None
    return values


def sent(values: Values) -> tuple[int, tuple[float, ...]]:
    """Return a hash of the names, and the first values, as rank 0 sends them."""
    names = sorted(values)[:MOST_VALUES]
    numbers = (values[name] for name in names)
    return names_hash(names), tuple(math.nan if each is None else each for each in numbers)


def received(own: Values, hashed: int, numbers: Sequence[float]) -> Values:
    """Return rank 0's values under the names that this rank gave; its own if those differ."""
    names = sorted(own)[:MOST_VALUES]
    if names_hash(names) != hashed:
        return own
    theirs = zip(names, numbers, strict=False)
    return {name: value if math.isfinite(value) else None for name, value in theirs}


def names_hash(names: Sequence[str]) -> int:
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    return int.from_bytes(digest[:7], "little")
