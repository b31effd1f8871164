"""Rows of alerts: rules, and messages on their way. Times are unix seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from everstep.wire.alerts import AlertEvent, AlertFormat, AlertWhen, DeliveryState
from service.model.rows import Row


@dataclass(frozen=True, slots=True)
class AlertRow(Row):
    """A rule of a project, and where its messages go."""

    id: str
    project: str
    name: str
    when: AlertWhen
    more_than: int | None
    stalled_s: float | None
    format: AlertFormat
    target: dict[str, Any] = field(repr=False)
    """``url``, ``routing_key`` or ``addresses``, as the format needs them; they may be secret."""
    created_by: str
    created_at: float


@dataclass(frozen=True, slots=True)
class DeliveryRow(Row):
    """A message of an alert, and what became of it."""

    seq: int
    """Order of creation."""
    id: str
    alert_id: str
    run_id: str | None
    incident: str
    event: AlertEvent
    message: dict[str, Any]
    """JSON of ``AlertMessage``, without links."""
    state: DeliveryState
    num_tries: int
    created_at: float
    next_at: float
    """When it is tried next, while it is waiting."""
    give_up_at: float
    """A try that fails after this is the last."""
    finished_at: float | None
    status: int | None
    answer: str | None
    error: str | None
