"""The changes that an event makes to its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from everstep.wire import Reason, RunStatus
from service.model.rows import MetricPoint
from service.model.run_rows import RunRow
from service.model.states import is_legal

NO_WORKERS: Final[Mapping[str, Any]] = MappingProxyType({"world_size": None, "workers": []})
"""Columns of a run without ranks."""


@dataclass(frozen=True)
class Changes:
    """What to write: ``columns`` of the run's row, a new status if any, and points of metrics."""

    columns: dict[str, Any] = field(default_factory=dict)
    status: RunStatus | None = None
    reason: Reason | None = None
    points: tuple[MetricPoint, ...] = ()


def to_status(run: RunRow, status: RunStatus, reason: Reason | None = None) -> dict[str, Any]:
    """Return arguments of Changes for a new status; none if the transition is not legal.

    For example, a STOPPING run stays STOPPING while its last steps are reported.
    """
    return {"status": status, "reason": reason} if is_legal(run.status, status) else {}
