"""Names of metrics: an evaluation's ``accuracy`` is the series ``val_accuracy``, beside the training's own ``accuracy``."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "val_"


def validation_name(name: str) -> str:
    """Name of the series of an evaluation's metric."""
    return name if name.startswith(PREFIX) else PREFIX + name


def lookup(values: Mapping[str, float | None], metric: str) -> float | None:
    """Value of a validation metric, whether it is called ``accuracy`` or ``val_accuracy`` on either side; None where missing."""
    short = metric.removeprefix(PREFIX)
    value = values.get(short)
    return value if value is not None else values.get(PREFIX + short)
