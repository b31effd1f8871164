"""Notifications for webhooks. Each is written in the transaction of the change that it reports, and
kept until delivered."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import delete, select, update

from everstep.wire import Failure
from service.db.engine import Database
from service.db.tables import notifications
from service.model.rows import Row
from service.model.run_rows import RunRow
from service.projections.alert_messages import failure_of

_DUE: Final = 20


@dataclass(frozen=True, slots=True)
class Notification(Row):
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
    none. ``with_failure`` completes it."""
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
    """Return the notification with the run's last failure, and what all of them have cost."""
    last = failure_of(failures[-1]).model_dump(mode="json") if failures else None
    lost = sum(each.steps_lost or 0 for each in failures)
    cost = {"steps_lost": lost, "recovery_s": sum(each.recovery_s or 0.0 for each in failures)}
    facts = {**json.loads(notification.body), "failure": last, "cost": cost}
    return replace(notification, body=json.dumps(facts))


class NotificationStore:
    """Notifications that are due. ``clock`` returns unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def due(self) -> list[Notification]:
        """Return the due notifications, the longest due first."""
        query = Notification.select(notifications).where(notifications.c.next_at <= self._clock())
        with self._database.read() as connection:
            return [
                Notification(*row)
                for row in connection.execute(query.order_by(notifications.c.next_at).limit(_DUE))
            ]

    def forget(self, notification: Notification) -> None:
        """Delete a notification that was delivered, or for which retries have ended."""
        with self._database.write() as connection:
            connection.execute(delete(notifications).where(*_key(notification)))

    def postpone(self, notification: Notification, until: float) -> None:
        """Retry at ``until``."""
        with self._database.write() as connection:
            connection.execute(
                update(notifications)
                .where(*_key(notification))
                .values(next_at=until, num_tries=notification.num_tries + 1)
            )

    def count(self) -> int:
        with self._database.read() as connection:
            return len(connection.execute(select(notifications.c.seq)).all())


def _key(notification: Notification) -> tuple[Any, Any]:
    return notifications.c.run_id == notification.run_id, notifications.c.seq == notification.seq
