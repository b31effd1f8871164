"""The database's tables. Times are unix seconds (float), sizes are bytes. migrations/ creates
exactly these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    and_,
    text,
)

from everstep.wire import RunStatus
from service.model.rows import EventRow
from service.model.run_rows import RunRow

_TYPES: Final = {str: Text, int: Integer, float: Double}
_FAILURES_ONLY = text("kind = 'failure'")
_UNENDED_ONLY = text("finished_at IS NULL")

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

RUN_ID = String(32)


def _run_id_key() -> Column[str]:
    return Column("run_id", RUN_ID, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)


def _column(name: str, kind: Any) -> Column[Any]:
    """Return the column of a run's field from its type: ``X | None`` is nullable, a text with Chars
    has that length, a list or a dict is JSON."""
    nullable = get_origin(kind) in (Union, UnionType)
    if nullable:
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is Annotated:
        sized: Any = String(next(mark.most for mark in kind.__metadata__))
        return Column(name, sized, primary_key=name == "id", nullable=nullable)
    if get_origin(kind) in (dict, list):
        # A nullable field that is None is NULL, not the JSON text "null".
        return Column(name, JSON(none_as_null=True) if nullable else JSON, nullable=nullable)
    return Column(name, _TYPES[kind], nullable=nullable)


_KINDS: Final = get_type_hints(RunRow, include_extras=True)
runs = Table(  # the fields are in RunRow
    "runs",
    metadata,
    *(_column(name, _KINDS[name]) for name in RunRow.__dataclass_fields__),
    Column("sweep_id", String(32)),  # until the next release: replicas of 0.1.0 read it
    Index(None, "created_at", "id"),
    Index(
        "ix_runs_unended",
        *("created_at", "id"),
        sqlite_where=_UNENDED_ONLY,
        postgresql_where=_UNENDED_ONLY,
    ),
    Index(None, "project", "created_at", "id"),
    Index(None, "project", "status", "created_at", "id"),
    Index(None, "status", "created_at", "id"),
    Index(None, "name", "created_at", "id"),
    Index(None, "replayed_run", "created_at"),
)

run_tags = Table(
    "run_tags",
    metadata,
    _run_id_key(),
    Column("key", String(64), primary_key=True),
    Column("value", String(256), nullable=False),
    Index(None, "key", "value", "run_id"),
)

transitions = Table(
    "transitions",
    metadata,
    _run_id_key(),
    Column("seq", Integer, primary_key=True),  # of the status event
    Column("from_status", String(16)),
    Column("to_status", String(16), nullable=False),
    Column("at", Double, nullable=False),
    Column("reason_code", String(64)),
    Column("reason_message", Text),
)

events = Table(
    "events",
    metadata,
    _run_id_key(),
    Column("seq", Integer, primary_key=True),
    Column("at", Double, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("submission", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("data", JSON, nullable=False),
    Index(None, "run_id", "kind", "seq"),
    # over all runs
    Index(
        "ix_events_failures_at", "at", sqlite_where=_FAILURES_ONLY, postgresql_where=_FAILURES_ONLY
    ),
    sqlite_with_rowid=False,  # always read by (run_id, seq): keep a run's events together
)

metrics = Table(
    "metrics",
    metadata,
    _run_id_key(),
    Column("name", String(128), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("at", Double, nullable=False),
    Column("value", Double),  # null: not finite
    sqlite_with_rowid=False,
)

checkpoint_checks = Table(
    "checkpoint_checks",
    metadata,
    _run_id_key(),
    Column("name", String(128), primary_key=True),
    Column("verified_at", Double, nullable=False),
    Column("problem", Text),  # null: sizes and digests of all files matched
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("scope", String(32), primary_key=True),  # token id
    Column("key", String(255), primary_key=True),
    Column("body_sha256", String(64), nullable=False),
    Column("run_id", RUN_ID, nullable=False),  # outlives the run: its key stays used
    Column("created_at", Double, nullable=False),
    Index(None, "created_at"),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("role", String(16), nullable=False),
    Column("project", String(64)),  # null: every project (admin)
    Column("sha256", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("last_used_at", Double),  # up to a few seconds behind
    # Not a foreign key: SQLite cannot add one to a table. No user is ever deleted.
    Column("user_id", String(32)),  # null: an administrator made it
    Column("owner", String(128)),  # the user's name; null: the token's own name
    Column("kind", String(16)),  # log_in | personal; null: an administrator made it
    UniqueConstraint("sha256"),
    Index(None, "user_id"),
)


sessions = Table(  # browser log-ins
    "sessions",
    metadata,
    Column("sha256", String(64), primary_key=True),  # of the cookie
    Column("token_id", String(32), ForeignKey("tokens.id", ondelete="CASCADE"), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("address", String(64)),  # where the log-in came from
    Column("browser", String(256)),  # its User-Agent header
    Index(None, "token_id", "created_at"),
    Index(None, "expires_at"),
)

projects = Table(
    "projects",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("max_workers", Integer),  # quotas; null: no limit
    Column("max_running", Integer),
    Column("max_queued", Integer),
    Column("created_at", Double, nullable=False),
)

code_archives = Table(  # who uploaded which archive; storage keeps equal ones once
    "code_archives",
    metadata,
    Column("project", String(64), primary_key=True),
    Column("digest", String(80), primary_key=True),
    Column("size_bytes", Integer, nullable=False),  # 0: uploaded before sizes were recorded
    Column("created_by", String(32), nullable=False),  # token id
    Column("created_at", Double, nullable=False),
)

audit_log = Table(
    "audit_log",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("token_id", String(32)),  # null: no valid token
    Column("token_name", String(128)),
    Column("role", String(16)),
    Column("address", String(64)),  # where the call came from
    Column("method", String(8), nullable=False),
    Column("path", String(512), nullable=False),
    Column("target", String(64)),  # what was created or changed
    Column("status", Integer, nullable=False),  # of the response
    Index(None, "token_id", "seq"),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("holder", String(128), nullable=False),
    # increases with every new holder: writes of an old one are refused
    Column("fence", Integer, nullable=False),
    Column("expires_at", Double, nullable=False),
)

storage_identity = Table(
    "storage_identity",
    metadata,
    Column("name", String(16), primary_key=True),  # "runs": the only storage
    # id of the storage that this database belongs to
    Column("storage_id", String(36), nullable=False),
    Column("recorded_at", Double, nullable=False),
    Column("seen_at", Double),  # when its file first existed; null: not written yet
    # id of this database, by which the storage shows whose it is; null before the first start
    Column("database_id", String(36)),
    # starts of services with this database: a copy of it has seen fewer
    Column("generation", Integer, nullable=False, server_default="0"),
)

node_marks = Table(
    "node_marks",
    metadata,
    Column("node_id", String(64), primary_key=True),
    # cordoned | draining | open (an administrator has uncordoned it)
    Column("state", String(16), nullable=False),
    Column("reason", Text),
    Column("by", String(128), nullable=False),  # name of the token, or of the service itself
    Column("at", Double, nullable=False),
    Column("deadline", Double),  # when a draining node will be removed
    Column("gone_since", Double),  # null: it was in the cluster at the last check
)


IS_UNENDED: Final = runs.c.finished_at.is_(None)
"""Condition on ``runs`` that few of them match, and that has an index: not ended."""
IS_LIVE: Final = and_(IS_UNENDED, runs.c.status != RunStatus.PAUSED.value)
"""Condition on ``runs``: queued, or submitted and not ended."""


@dataclass(frozen=True)
class TableHooks:
    """What the tables of an annex take part in: transactions of the core."""

    run_changed: Callable[[Connection, RunRow, float], None] | None = None
    """Called at the end of a transaction that changes a run, with the run as it will be and unix
    seconds, after one of ``run_events``, and when the run ends or pauses."""
    run_events: frozenset[str] = frozenset()
    status_changed: Callable[[Connection, RunRow, EventRow], None] | None = None
    """Called when a run has reached a status, in the same transaction. Gets the run and the event
    of the change."""
    of_project: tuple[Table, ...] = ()
    """Tables with a column ``project`` whose rows are deleted with their project."""
