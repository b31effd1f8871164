"""Names of metrics. An evaluation's ``accuracy`` is the series ``val_accuracy``, next to the
training's own ``accuracy``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

PREFIX = "val_"
MAX_NAMES = 200
"""Most metric names of a run. Each is a series, and part of every answer about the run."""
MAX_STEP_NAMES = 150
"""Most names that steps may use, so that evaluations find room."""
_SMALLER_IS_BETTER = re.compile(
    r"(loss|perplexity|error|error_rate|mse|mae|nll|bits_per_\w+)$|(^|[^a-z])(err|ppl|wer|cer|eer|ter|mape|smape|fid|ece|brier)$"
)


SYSTEM_FIGURES = (
    "cpu_cores",
    "rss_bytes",
    "net_in_bytes_per_s",
    "net_out_bytes_per_s",
    "gpu_busy_percent",
    "gpu_used_bytes",
    "gpu_power_w",
    "gpu_celsius",
)
"""What ranks report about their hosts and GPUs. Each rank has a series of each."""
MOST_SYSTEM_RANKS = 64
"""Ranks from this one on have no such series."""
_SYSTEM = re.compile(rf"system\.({'|'.join(SYSTEM_FIGURES)})\.rank(\d{{1,6}})")


def system_name(figure: str, rank: int) -> str:
    """Return the name of a rank's series of a figure, such as ``system.cpu_cores.rank0``."""
    return f"system.{figure}.rank{rank}"


def system_figure(name: str) -> tuple[str, int] | None:
    """Return the figure and the rank of such a series; None for another name."""
    found = _SYSTEM.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))


def mode_of(metric: str | None) -> Literal["min", "max"]:
    """Return whether smaller or larger values of a metric are better, by its name: ``min`` for
    names that end in loss, error and the like.

    >>> mode_of("val_loss"), mode_of("wer"), mode_of("accuracy"), mode_of("power")
    ('min', 'min', 'max', 'max')
    """
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", metric or "").lower()
    # scikit-learn's prefix for errors with the sign changed
    negated = name.removeprefix(PREFIX).startswith(("neg_", "negative_"))
    return "min" if _SMALLER_IS_BETTER.search(name) and not negated else "max"


def validation_name(name: str) -> str:
    """Return the name of the series for an evaluation's metric."""
    return name if name.startswith(PREFIX) else PREFIX + name


class NameLimit:
    """Admits metric names in order of arrival, up to a limit."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.known = set(known)

    def refused(
        self, names: Iterable[str], most: int = MAX_NAMES, always: Collection[str] = ()
    ) -> list[str]:
        """Return the names that are not admitted; remember the others.

        Args:
            names: In order of admission.
            most: Limit on all names, including these.
            always: Names that are admitted beyond the limit.
        """
        refused = []
        for name in names:
            if name in self.known or name in always or len(self.known) < most:
                self.known.add(name)
            else:
                refused.append(name)
        return refused


def lookup(values: Mapping[str, float | None], metric: str) -> float | None:
    """Return the value of a validation metric, with or without ``val_`` on either side; None if
    missing."""
    short = metric.removeprefix(PREFIX)
    value = values.get(short)
    return value if value is not None else values.get(PREFIX + short)
