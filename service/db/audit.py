"""The audit log: who changed what, when and from where. Entries are written in the transaction of
the change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Connection, delete, insert, or_, select, update

from everstep.wire import Failure
from service.db.engine import Store
from service.db.tables import audit_log, notifications
from service.model.rows import AuditRow, Role, StoredRow
from service.model.run_rows import RunRow
from service.projections.attempts import failure_of

_PATH_CHARS: Final = 512
_SHORT_CHARS: Final = 64
_INSERT: Final = insert(audit_log)


@dataclass
class AuditedCall:
    """One call, completed as it is processed. A context variable carries it, also into threads."""

    method: str
    path: str
    address: str | None
    token_id: str | None = None
    token_name: str | None = None
    role: Role | None = None
    target: str | None = None
    """Id of what was created or changed."""
    status: int = 200
    seq: int | None = None
    """Position in the log; None until it is written."""
    written_as: tuple[str | None, int] | None = None
    """Target and status with which it was written."""

    def columns(self, at: float) -> dict[str, Any]:
        return {
            "at": at,
            "token_id": self.token_id,
            "token_name": self.token_name,
            "role": self.role,
            "address": self.address[:_SHORT_CHARS] if self.address else None,
            "method": self.method[:8],
            "path": self.path[:_PATH_CHARS],
            "target": self.target[:_SHORT_CHARS] if self.target else None,
            "status": self.status,
        }


_current: ContextVar[AuditedCall | None] = ContextVar("audit_entry", default=None)


def begin_entry(entry: AuditedCall | None) -> None:
    """Attribute writes in this context to the entry from here on."""
    _current.set(entry)


def current_entry() -> AuditedCall | None:
    return _current.get()


def note_target(target: str) -> None:
    """Set the target of the current call, if it is audited."""
    entry = _current.get()
    if entry is not None:
        entry.target = target


class AuditStore(Store):
    """The audit log."""

    def join(self, connection: Connection) -> Callable[[], None] | None:
        """Write the current entry into its call's transaction; return a function to call after the
        commit.

        A rollback removes the entry, and a retry writes it again.
        """
        entry = _current.get()
        if entry is None or entry.seq is not None or entry.token_id is None:
            return None
        result = connection.execute(_INSERT, entry.columns(self.clock()))
        key = result.inserted_primary_key
        assert key is not None
        written_as, seq = (entry.target, entry.status), int(key[0])

        def committed() -> None:
            entry.seq, entry.written_as = seq, written_as

        return committed

    def complete(self, entry: AuditedCall) -> None:
        """Write the entry once the response is known, if the call wrote nothing; correct target and
        status if they changed."""
        if entry.seq is None:
            with self._database.write() as connection:
                key = connection.execute(_INSERT, entry.columns(self.clock())).inserted_primary_key
            assert key is not None
            entry.seq, entry.written_as = int(key[0]), (entry.target, entry.status)
        elif entry.written_as != (entry.target, entry.status):
            answered = update(audit_log).where(audit_log.c.seq == entry.seq)
            with self._database.write() as connection:
                connection.execute(answered.values(target=entry.target, status=entry.status))

    def page(
        self, limit: int, before: int | None = None, token_id: str | None = None
    ) -> list[AuditRow]:
        """Return entries, newest first: those before the entry ``before``, and of one token, if
        given."""
        query = AuditRow.select(audit_log).order_by(audit_log.c.seq.desc()).limit(limit)
        if before is not None:
            query = query.where(audit_log.c.seq < before)
        if token_id is not None:
            query = query.where(audit_log.c.token_id == token_id)
        return self._rows(AuditRow, query)


# ---------------------------------------------------------------- notifications

# Notifications for webhooks. Each is written in the transaction of the change that it reports, and
# kept until delivered.

_DUE: Final = 20


@dataclass(frozen=True, slots=True)
class Notification(StoredRow):
    """A POST to send. Times are unix seconds."""

    run_id: str
    seq: int
    url: str
    body: str
    created_at: float
    next_at: float
    num_tries: int


def notification_of(run: RunRow, seq: int, at: float) -> Notification | None:
    """Return the notification for the status that a run has just reached; None if its spec wants
    none. ``with_failure`` completes it at the first try."""
    asked = run.stored_spec.notify
    if asked is None or run.status.value not in asked.on:
        return None
    reason = (
        None
        if run.reason_code is None
        else {"code": run.reason_code, "message": run.reason_message}
    )
    facts = {
        "run_id": run.id,
        "name": run.name,
        "project": run.project,
        "status": run.status.value,
        "reason": reason,
    }
    body = json.dumps({**facts, "step": run.step, "seq": seq, "at": at})
    return Notification(run.id, seq, asked.url, body, at, at, 0)


def with_failure(notification: Notification, failures: Sequence[Failure]) -> Notification:
    """Return the notification with the run's last failure, and what all of them have cost.

    Finding them takes as long as the history is, so the transaction of the change does not."""
    last = failure_of(failures[-1]).model_dump(mode="json") if failures else None
    lost = sum(each.steps_lost or 0 for each in failures)
    cost = {"steps_lost": lost, "recovery_s": sum(each.recovery_s or 0.0 for each in failures)}
    facts = {**json.loads(notification.body), "failure": last, "cost": cost}
    return replace(notification, body=json.dumps(facts))


class NotificationStore(Store):
    """Notifications that are due."""

    def due(self) -> list[Notification]:
        """Return the due notifications, the longest due first."""
        # The first try waits for nothing: if it lies ahead, the clock was set back.
        columns = notifications.c
        is_due = or_(columns.next_at <= self.clock(), columns.num_tries == 0)
        query = Notification.select(notifications).where(is_due)
        return self._rows(Notification, query.order_by(notifications.c.next_at).limit(_DUE))

    def forget(self, notification: Notification) -> None:
        """Delete a notification that was delivered, or for which retries have ended."""
        with self._database.write() as connection:
            connection.execute(delete(notifications).where(*_key(notification)))

    def postpone(self, notification: Notification, until: float) -> None:
        """Retry at ``until``, with the body of now."""
        with self._database.write() as connection:
            connection.execute(
                update(notifications)
                .where(*_key(notification))
                .values(body=notification.body, next_at=until, num_tries=notification.num_tries + 1)
            )

    def count(self) -> int:
        with self._database.read() as connection:
            return len(connection.execute(select(notifications.c.seq)).all())


def _key(notification: Notification) -> tuple[Any, Any]:
    return notifications.c.run_id == notification.run_id, notifications.c.seq == notification.seq
