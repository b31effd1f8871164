"""The tables of alerts and webhooks, and their rows. Times are unix seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from everstep.wire.alerts import AlertEvent, AlertFormat, AlertWhen, DeliveryState
from service.db.tables import RUN_ID, metadata
from service.model.rows import StoredRow

alerts = Table(
    "alerts",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("name", String(128), nullable=False),
    Column("when", String(16), nullable=False),
    Column("more_than", Integer),
    Column("stalled_s", Double),
    Column("format", String(16), nullable=False),
    Column("target", JSON, nullable=False),  # where to, with its secrets
    Column("created_by", String(32), nullable=False),  # token id
    Column("created_at", Double, nullable=False),
    Index(None, "project"),
)


def _alert_key(*, primary_key: bool = False) -> Column[str]:
    key = ForeignKey("alerts.id", ondelete="CASCADE")
    return Column("alert_id", String(32), key, primary_key=primary_key)


alert_incidents = Table(  # what was reported and not yet resolved
    "alert_incidents",
    metadata,
    _alert_key(primary_key=True),
    Column("run_id", RUN_ID, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("subject", String(32), primary_key=True),
    Column("opened_at", Double, nullable=False),
    Index(None, "run_id"),
)

alert_deliveries = Table(
    "alert_deliveries",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False),
    _alert_key(),  # null: a webhook, which a run's spec asks for
    Column("url", Text),  # of a webhook; null: the alert says where to
    Column("run_id", RUN_ID),  # null: a test; not a foreign key: sent even if the run is deleted
    Column("incident", String(128), nullable=False),
    Column("event", String(16), nullable=False),
    Column("message", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("num_tries", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("next_at", Double, nullable=False),
    Column("give_up_at", Double, nullable=False),
    Column("finished_at", Double),
    Column("status", Integer),
    Column("answer", Text),
    Column("error", Text),
    UniqueConstraint("id"),
    Index(None, "alert_id", "seq"),
    Index(None, "state", "next_at"),
)


notifications = Table(  # until the next release: replicas of 0.1.0 keep webhooks here
    "notifications",
    metadata,
    Column("run_id", RUN_ID, primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("url", String(2048), nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("next_at", Double, nullable=False),
    Column("num_tries", Integer, nullable=False),
    Index(None, "next_at"),
)


@dataclass(frozen=True, slots=True)
class AlertRow(StoredRow):
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
class DeliveryRow(StoredRow):
    """A message of an alert or a webhook, and what became of it."""

    seq: int
    """Order of creation."""
    id: str
    alert_id: str | None
    url: str | None = field(repr=False)
    run_id: str | None
    incident: str
    event: AlertEvent
    message: dict[str, Any]
    """JSON of ``AlertMessage`` or of a webhook's body, without links."""
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
