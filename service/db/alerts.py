"""Alerts of projects: rules, and the messages that they have caused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from sqlalchemy import Connection, delete, insert, update

from everstep.wire.alerts import AlertEvent, AlertRequest
from service.db.alert_tables import alert_deliveries, alerts
from service.db.audit import note_target
from service.db.engine import Database
from service.db.ids import new_alert_id, new_delivery_id
from service.db.projects import ensure_project
from service.model.alert_rows import AlertRow, DeliveryRow

RETRIES_LAST_S: Final = 24 * 3600.0
_COLUMNS: Final = alert_deliveries.c


class AlertStore:
    """Rules and their messages, for whoever manages them. ``clock`` returns unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def create(self, wanted: AlertRequest, token_id: str) -> AlertRow:
        """Add a rule. Raises UnknownProject."""
        now = self._clock()
        row = AlertRow(
            new_alert_id(now),
            wanted.project,
            wanted.name,
            wanted.when,
            wanted.more_than,
            wanted.stalled_s,
            wanted.format,
            target_of(wanted),
            token_id,
            now,
        )
        note_target(row.id)
        with self._database.write() as connection:
            ensure_project(connection, wanted.project, now, create=False)
            connection.execute(insert(alerts), row.columns())
        return row

    def get(self, alert_id: str) -> AlertRow | None:
        with self._database.autocommit() as connection:
            row = connection.execute(
                AlertRow.select(alerts).where(alerts.c.id == alert_id)
            ).one_or_none()
        return None if row is None else AlertRow(*row)

    def all(self, project: str | None = None) -> list[AlertRow]:
        """Return the rules of one project, or of all."""
        query = AlertRow.select(alerts)
        if project is not None:
            query = query.where(alerts.c.project == project)
        with self._database.autocommit() as connection:
            return [AlertRow(*row) for row in connection.execute(query)]

    def delete(self, alert_id: str) -> bool:
        """Delete a rule with its messages, sent or not. Return False if it does not exist."""
        with self._database.write() as connection:
            gone = connection.execute(delete(alerts).where(alerts.c.id == alert_id))
        return gone.rowcount > 0

    def add_test(self, alert: AlertRow, message: Mapping[str, Any]) -> DeliveryRow:
        """Queue a test message. It is tried once."""
        now = self._clock()
        with self._database.write() as connection:
            delivery_id = queue(
                connection, alert.id, None, "test", message, now, retries_last_s=0.0
            )
            return _delivery(connection, delivery_id)

    def deliveries(
        self, alert_id: str | None, limit: int, before: int | None = None
    ) -> list[DeliveryRow]:
        """Return the messages of a rule, or of all, newest first; only those before ``before``, a
        ``seq``."""
        query = DeliveryRow.select(alert_deliveries)
        if alert_id is not None:
            query = query.where(_COLUMNS.alert_id == alert_id)
        if before is not None:
            query = query.where(_COLUMNS.seq < before)
        with self._database.autocommit() as connection:
            found = connection.execute(query.order_by(_COLUMNS.seq.desc()).limit(limit))
            return [DeliveryRow(*row) for row in found]

    def send_again(self, alert_id: str, delivery_id: str) -> DeliveryRow | None:
        """Queue a message again, delivered or not, with the same id; None if there is none."""
        now = self._clock()
        again = {
            "state": "waiting",
            "num_tries": 0,
            "next_at": now,
            "give_up_at": now + RETRIES_LAST_S,
            "finished_at": None,
        }
        with self._database.write() as connection:
            changed = connection.execute(
                update(alert_deliveries)
                .where(_COLUMNS.id == delivery_id, _COLUMNS.alert_id == alert_id)
                .values(again)
            )
            return _delivery(connection, delivery_id) if changed.rowcount else None


def target_of(wanted: AlertRequest) -> dict[str, Any]:
    """Return where messages go, as it is stored."""
    given = {
        "url": wanted.url and wanted.url.get_secret_value(),
        "routing_key": wanted.routing_key and wanted.routing_key.get_secret_value(),
        "addresses": wanted.addresses and list(wanted.addresses),
    }
    return {name: value for name, value in given.items() if value is not None}


def queue(
    connection: Connection,
    alert_id: str,
    run_id: str | None,
    event: AlertEvent,
    message: Mapping[str, Any],
    now: float,
    *,
    retries_last_s: float = RETRIES_LAST_S,
) -> str:
    """Queue a message in this transaction; return the delivery's id.

    Args:
        connection: Of the transaction of what it reports.
        alert_id: Its rule.
        run_id: Its run; None for a test.
        event: Whether it begins or ends its incident.
        message: JSON of an ``AlertMessage``; its id is set here.
        now: Unix seconds.
        retries_last_s: A try that fails later is the last.
    """
    delivery_id = new_delivery_id(now)
    row = {
        "id": delivery_id,
        "alert_id": alert_id,
        "run_id": run_id,
        "incident": message["incident"],
        "event": event,
        "message": {**message, "id": delivery_id},
        "state": "waiting",
        "num_tries": 0,
        "created_at": now,
        "next_at": now,
        "give_up_at": now + retries_last_s,
    }
    connection.execute(insert(alert_deliveries), row)
    return delivery_id


def _delivery(connection: Connection, delivery_id: str) -> DeliveryRow:
    query = DeliveryRow.select(alert_deliveries).where(_COLUMNS.id == delivery_id)
    return DeliveryRow(*connection.execute(query).one())
