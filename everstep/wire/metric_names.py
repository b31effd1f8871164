"""Names of metrics: an evaluation's ``accuracy`` is the series ``val_accuracy``, beside the
training's own ``accuracy``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

PREFIX = "val_"
MAX_NAMES = 200
"""Most names of metrics of a run. Each is a series, and part of every answer about the run."""
MAX_STEP_NAMES = 150
"""Most of them that steps report, so that evaluations find room."""
_SMALLER_IS_BETTER = re.compile(
    r"(loss|perplexity|error|error_rate|mse|mae|nll|bits_per_\w+)$|(^|[^a-z])(err|ppl|wer|cer|eer|ter|mape|smape|fid|ece|brier)$"
)


def mode_of(metric: str | None) -> Literal["min", "max"]:
    """Return which values of a metric are the best ones, by its name: ``min`` for what ends in
    loss, error and their kin.

    >>> mode_of("val_loss"), mode_of("wer"), mode_of("accuracy"), mode_of("power")
    ('min', 'min', 'max', 'max')
    """
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", metric or "").lower()
    # as scikit-learn calls those that are to grow
    negated = name.removeprefix(PREFIX).startswith(("neg_", "negative_"))
    return "min" if _SMALLER_IS_BETTER.search(name) and not negated else "max"


def validation_name(name: str) -> str:
    """Name of the series of an evaluation's metric."""
    return name if name.startswith(PREFIX) else PREFIX + name


class NameLimit:
    """Admits the first names of metrics that come, and no more."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.known = set(known)

    def refused(
        self, names: Iterable[str], most: int = MAX_NAMES, always: Collection[str] = ()
    ) -> list[str]:
        """Return the names that are not admitted; the others are known from now on.

        Args:
            names: In the order in which they are admitted.
            most: How many names there may be with these.
            always: Names that are admitted beyond that.
        """
        refused = []
        for name in names:
            if name in self.known or name in always or len(self.known) < most:
                self.known.add(name)
            else:
                refused.append(name)
        return refused


def lookup(values: Mapping[str, float | None], metric: str) -> float | None:
    """Value of a validation metric, whether it is called ``accuracy`` or ``val_accuracy`` on either
    side; None where missing."""
    short = metric.removeprefix(PREFIX)
    value = values.get(short)
    return value if value is not None else values.get(PREFIX + short)
