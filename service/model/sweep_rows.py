"""Frozen rows of sweeps and their runs. Times are unix seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everstep.spec.sweep import SweepSpec
from everstep.wire import RunStatus
from everstep.wire.sweep import SweepStatus
from service.model.rows import Row
from storage.run_control import Stop


@dataclass(frozen=True, slots=True)
class SweepRow(Row):
    """A sweep."""

    id: str
    name: str
    project: str
    status: str
    reason_code: str | None
    reason_message: str | None
    spec: dict[str, Any]
    """The SweepSpec, with name, mode and seed filled in."""
    created_by: str
    """Token id."""
    created_at: float
    finished_at: float | None

    @property
    def state(self) -> SweepStatus:
        return SweepStatus(self.status)

    @property
    def sweep_spec(self) -> SweepSpec:
        """Return the spec as stored: checks that were added later do not refuse it."""
        return SweepSpec.model_validate(self.spec)


@dataclass(frozen=True, slots=True)
class TrialRow(Row):
    """A run of a sweep, with what its own row says now."""

    sweep_id: str
    number: int
    params: dict[str, Any]
    run_id: str | None
    """None before it is submitted; the id stays when the run is deleted."""
    rung: int
    """Rungs of successive halving from which it went on."""
    results: list[list[Any]]
    """[step, value | None] for each rung that it has reached."""
    best_value: float | None
    best_step: int | None
    seen_step: int | None
    """Last step of the metric that ``best_value`` counts; None if the run never reported it."""
    status: RunStatus | None
    """None before it is submitted, and once its run is deleted."""
    step: int | None
    total_steps: int | None
    stop_requested: Stop | None
    row_version: int | None

    def __post_init__(self) -> None:
        if self.status is not None:
            object.__setattr__(self, "status", RunStatus(self.status))

    @property
    def is_deleted(self) -> bool:
        return self.run_id is not None and self.status is None
