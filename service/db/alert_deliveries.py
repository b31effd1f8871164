"""Messages of alerts that are due, and what becomes of each try."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from sqlalchemy import delete, exists, select, update

from service.db.alert_tables import alert_deliveries, alerts
from service.db.engine import Database
from service.model.alert_rows import AlertRow, DeliveryRow

KEPT_S: Final = 30 * 86_400.0
"""Messages are kept for so long after their last try."""
_DUE: Final = 20
_COLUMNS: Final = alert_deliveries.c


class DeliveryStore:
    """Messages on their way. ``clock`` returns unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def due(self) -> list[tuple[DeliveryRow, AlertRow]]:
        """Return messages to send now, the longest due first, each with its rule.

        Messages of one incident are sent in order: one that waits holds up the later ones, so that
        a receiver never resolves what it has not seen yet.
        """
        earlier = alert_deliveries.alias("earlier")
        is_behind = exists().where(
            earlier.c.alert_id == _COLUMNS.alert_id,
            earlier.c.incident == _COLUMNS.incident,
            earlier.c.state == "waiting",
            earlier.c.seq < _COLUMNS.seq,
        )
        query = (
            DeliveryRow.select(alert_deliveries)
            .add_columns(*(alerts.c[name] for name in AlertRow.__dataclass_fields__))
            .join(alerts, alerts.c.id == _COLUMNS.alert_id)
            .where(_COLUMNS.state == "waiting", _COLUMNS.next_at <= self._clock(), ~is_behind)
            .order_by(_COLUMNS.next_at, _COLUMNS.seq)
            .limit(_DUE)
        )
        width = len(DeliveryRow.__dataclass_fields__)
        with self._database.autocommit() as connection:
            found = connection.execute(query).all()
        return [(DeliveryRow(*row[:width]), AlertRow(*row[width:])) for row in found]

    def record(self, delivery: DeliveryRow, values: Mapping[str, Any]) -> None:
        """Record the result of a try, unless the message was queued again meanwhile."""
        same_try = _COLUMNS.num_tries == delivery.num_tries
        with self._database.write() as connection:
            connection.execute(
                update(alert_deliveries)
                .where(_COLUMNS.seq == delivery.seq, _COLUMNS.state == "waiting", same_try)
                .values(**values, num_tries=delivery.num_tries + 1)
            )

    def prune(self) -> None:
        """Delete old messages."""
        old = (_COLUMNS.state != "waiting", _COLUMNS.finished_at < self._clock() - KEPT_S)
        with self._database.autocommit() as connection:
            if connection.execute(select(_COLUMNS.seq).where(*old).limit(1)).first() is None:
                return
        with self._database.write() as connection:
            connection.execute(delete(alert_deliveries).where(*old))
