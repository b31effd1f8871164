"""Asynchronous successive halving: where the rungs are, and which runs go on from them.

A run trains to a rung and pauses there with its value of the metric. It goes on if it is among the
best of those that have reached the rung: of ``n`` runs, ``n // reduction_factor`` go on. No run
waits for the others to reach the rung: each new value is judged with those that are known. (Li et
al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020.)
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from everstep.spec.sweep import AshaSpec
from everstep.wire import RunStatus
from storage.run_control import Stop

DEFAULT_RUNGS: Final = 2
"""Rungs where ``min_steps`` does not set the first."""
_LOST: Final = frozenset({RunStatus.FAILED, RunStatus.CANCELLED})


@dataclass(frozen=True)
class TrialFacts:
    """What the engine knows of one run of a sweep."""

    number: int
    status: RunStatus | None = None
    """Status of its run; None before it is submitted."""
    is_gone: bool = False
    """Whether its run was deleted."""
    stop: Stop | None = None
    """What its run was asked to do."""
    rung: int = 0
    """Rungs from which it went on: it trains to the rung of this number."""
    results: tuple[float | None, ...] = ()
    """Its value at each rung that it has reached; None was not finite."""
    has_metric: bool = False
    """Whether it ever reported the metric."""
    has_value: bool = False
    """Whether one of the values was finite."""

    @property
    def is_submitted(self) -> bool:
        return self.status is not None or self.is_gone

    @property
    def has_ended(self) -> bool:
        return self.is_gone or (self.status is not None and self.status.terminal)

    @property
    def is_lost(self) -> bool:
        """Return whether it ended without training to its end."""
        return self.is_gone or self.status in _LOST

    @property
    def is_at_rung(self) -> bool:
        """Return whether it has reached the rung that it trained to."""
        return len(self.results) > self.rung


def rung_step(scheduler: AshaSpec, rung: int, total_steps: int | None) -> int | None:
    """Return the step of a rung, 0 is the first; None if the run has no such rung, or its length is
    not known yet.

    >>> [rung_step(AshaSpec(name="asha"), rung, 90) for rung in range(3)]
    [10, 30, None]
    >>> [rung_step(AshaSpec(name="asha", min_steps=20), rung, 90) for rung in range(3)]
    [20, 60, None]
    """
    factor = scheduler.reduction_factor
    if scheduler.min_steps is not None:
        step = scheduler.min_steps * factor**rung
    elif total_steps is None or rung >= DEFAULT_RUNGS:
        return None
    else:
        step = math.ceil(total_steps / factor ** (DEFAULT_RUNGS - rung))
    return step if total_steps is None or step < total_steps else None


class Ranking:
    """The order of the runs of a sweep at each rung.

    A value that is not finite is the worst, and never goes on. Of equal values the run with the
    lower number is better. A run that ended without training to its end counts among those that
    reached the rung, and leaves its place to the next best.
    """

    def __init__(
        self, trials: Collection[TrialFacts], reduction_factor: int, *, larger_is_better: bool
    ) -> None:
        self._trials = trials
        self._factor = reduction_factor
        self._sign = -1.0 if larger_is_better else 1.0
        self._best: dict[int, frozenset[int]] = {}

    def may_go_on(self, trial: TrialFacts) -> bool:
        """Return whether a run at a rung is among the best there."""
        return trial.number in self.best_at(len(trial.results) - 1)

    def best_at(self, rung: int) -> frozenset[int]:
        """Return the numbers of the runs that may go on from a rung."""
        if rung not in self._best:
            self._best[rung] = self._found_best(rung)
        return self._best[rung]

    def _found_best(self, rung: int) -> frozenset[int]:
        reached = [trial for trial in self._trials if len(trial.results) > rung]
        running = [
            trial for trial in reached if not trial.is_lost and is_finite(trial.results[rung])
        ]
        best = sorted(running, key=lambda trial: self._place(trial, rung))
        return frozenset(trial.number for trial in best[: len(reached) // self._factor])

    def sorted(self, trials: Collection[TrialFacts]) -> list[TrialFacts]:
        """Return runs that wait at their rungs: those of the highest rung first, then the best."""
        return sorted(
            trials,
            key=lambda trial: (-len(trial.results), self._place(trial, len(trial.results) - 1)),
        )

    def _place(self, trial: TrialFacts, rung: int) -> tuple[bool, float, int]:
        value = trial.results[rung]
        if value is None or not math.isfinite(value):
            return (True, 0.0, trial.number)
        return (False, self._sign * value, trial.number)


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
