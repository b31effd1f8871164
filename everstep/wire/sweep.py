"""A sweep and its runs, as the service shows them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal

from everstep.wire.base import Answer, Time
from everstep.wire.run import RunStatus


class SweepStatus(StrEnum):
    """The status of a sweep. The last three are terminal."""

    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        return self in (SweepStatus.SUCCEEDED, SweepStatus.FAILED, SweepStatus.CANCELLED)


class SweepReasonCode(StrEnum):
    """Why a sweep has its status, or what it waits for."""

    CANCELLED_BY_USER = "cancelled_by_user"
    RUNS_CANCELLED = "runs_cancelled"
    RUNS_FAILED = "runs_failed"
    METRIC_MISSING = "metric_missing"
    NO_VALUE = "no_value"
    WAITING_FOR_QUOTA = "waiting_for_quota"
    WAITING_FOR_PAUSED_RUNS = "waiting_for_paused_runs"


class SweepReason(Answer):
    code: SweepReasonCode
    """Machine-readable cause."""
    message: str
    """The cause in words, with what to do."""


class SweepProgress(Answer):
    """Number of runs in each state; they add up to ``total``."""

    total: int
    waiting: int
    """Not submitted yet."""
    active: int
    """In the queue, or on the cluster."""
    paused: int
    """Paused at a rung, or by a user."""
    succeeded: int
    failed: int
    cancelled: int
    """Cancelled or deleted, by the sweep or by a user."""

    @property
    def ended(self) -> int:
        """Return the number of runs that have ended."""
        return self.succeeded + self.failed + self.cancelled


class SweepBest(Answer):
    """The run with the best value of the metric so far."""

    run_id: str
    number: int
    """Number of the run in the sweep, from 0."""
    value: float
    """Its best value."""
    step: int
    """Optimizer steps at that value."""
    params: dict[str, Any]
    """Field of the spec -> value."""


class SweepLinks(Answer):
    dashboard: str | None
    """URL of the sweep's own page."""


class Sweep(Answer):
    """Runs of one spec with other values of some fields."""

    id: str
    name: str
    project: str
    status: SweepStatus
    reason: SweepReason | None
    metric: str
    """Metric by which runs are compared."""
    mode: Literal["min", "max"]
    """Whether the smallest or the largest value is best."""
    scheduler: str
    """``none`` or ``asha``."""
    seed: int | None
    """Seed of the drawn values; null if none are drawn."""
    max_parallel: int | None
    """Most runs at a time; null has no limit."""
    created_at: Time
    finished_at: Time | None
    progress: SweepProgress
    best: SweepBest | None
    """Null while no run has a finite value."""
    links: SweepLinks


class RungResult(Answer):
    """What a run was judged by at a rung."""

    step: int
    """First step from the rung on at which the run reported the metric."""
    value: float | None
    """Value there; null was not finite."""


class SweepRun(Answer):
    """One run of a sweep."""

    number: int
    """Number in the sweep, from 0."""
    params: dict[str, Any]
    """Field of the spec -> value."""
    run_id: str | None
    """Null before it is submitted."""
    is_deleted: bool
    """Whether the run was deleted."""
    status: RunStatus | None
    """Status of the run; null before it is submitted, and once it is deleted."""
    step: int
    """Optimizer steps done."""
    total_steps: int | None
    """Steps of the whole run; null until that is known."""
    value: float | None
    """Best value of the sweep's metric; null if there is no finite one."""
    value_step: int | None
    """Optimizer steps at that value."""
    rung: int
    """Rungs of successive halving from which it went on."""
    results: tuple[RungResult, ...]
    """What it was judged by, for each rung that it has reached."""


def best_first(runs: Iterable[SweepRun], mode: Literal["min", "max"]) -> list[SweepRun]:
    """Return runs with a value, the best first, then the others by number."""
    sign = -1.0 if mode == "max" else 1.0
    return sorted(runs, key=lambda run: (run.value is None, sign * (run.value or 0.0), run.number))
