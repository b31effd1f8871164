"""The tables of sweeps. Times are unix seconds (float)."""

from __future__ import annotations

from typing import Final

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

from everstep.wire.sweep import SweepStatus
from service.db.tables import RUN_ID, metadata

sweeps = Table(
    "sweeps",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("project", String(64), nullable=False),
    Column("status", String(16), nullable=False),
    Column("reason_code", String(64)),
    Column("reason_message", Text),
    Column("spec", JSON, nullable=False),
    Column("created_by", String(32), nullable=False),  # token id
    Column("created_at", Double, nullable=False),
    Column("finished_at", Double),
    Column("idempotency_key", String(255)),
    Column("body_sha256", String(64)),
    UniqueConstraint("created_by", "idempotency_key"),
    Index(None, "created_at", "id"),
    Index(None, "project", "created_at", "id"),
    Index(None, "status"),
)

UNENDED: Final = sweeps.c.status.in_(
    sorted(status.value for status in SweepStatus if not status.terminal)
)
"""Condition on ``sweeps``: it submits runs, or stops them."""

sweep_runs = Table(
    "sweep_runs",
    metadata,
    Column("sweep_id", String(32), ForeignKey("sweeps.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("params", JSON, nullable=False),
    Column("spec", JSON, nullable=False),  # of the run, as resolved
    Column("run_id", RUN_ID),  # not a foreign key: outlives the run
    Column("rung", Integer, nullable=False),
    Column("results", JSON, nullable=False),
    Column("best_value", Double),
    Column("best_step", Integer),
    Column("seen_step", Integer),
)
