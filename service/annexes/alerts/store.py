"""Alerts of projects: rules, and the messages that they have caused."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from sqlalchemy import Connection, delete, exists, func, insert, or_, select, update

from everstep.wire import RunStatus, Straggler
from everstep.wire.alerts import AlertEvent, AlertRequest
from everstep.wire.events import EventKind
from service.annexes.alerts.rules import (
    HOUR_S,
    NO_FAILURE,
    AlertFacts,
    IncidentChanges,
    changes,
    message_of,
    webhook_of,
)
from service.annexes.alerts.tables import (
    AlertRow,
    DeliveryRow,
    alert_deliveries,
    alert_incidents,
    alerts,
    notifications,
)
from service.db.audit import note_target
from service.db.engine import Store
from service.db.events import events_of
from service.db.ids import new_id
from service.db.projects import ensure_project
from service.db.tables import IS_LIVE, events, runs, transitions
from service.model.rows import EventRow, past
from service.model.run_rows import RunRow
from service.projections import protection as straggler_fold
from service.projections.goodput import WorkLedger
from service.projections.handlers import folded

RETRIES_LAST_S: Final = 24 * 3600.0
_COLUMNS: Final = alert_deliveries.c


class AlertStore(Store):
    """Rules and their messages, for whoever manages them."""

    def create(self, wanted: AlertRequest, token_id: str) -> AlertRow:
        """Add a rule. Raises UnknownProject."""
        now = self.clock()
        row = AlertRow(
            new_id("alr", now),
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
        with self._database.read() as connection:
            row = connection.execute(
                AlertRow.select(alerts).where(alerts.c.id == alert_id)
            ).one_or_none()
        return None if row is None else AlertRow(*row)

    def all(self, project: str | None = None) -> list[AlertRow]:
        """Return the rules of one project, or of all."""
        query = AlertRow.select(alerts)
        if project is not None:
            query = query.where(alerts.c.project == project)
        return self._rows(AlertRow, query)

    def delete(self, alert_id: str) -> bool:
        """Delete a rule with its messages, sent or not. Return False if it does not exist."""
        with self._database.write() as connection:
            gone = connection.execute(delete(alerts).where(alerts.c.id == alert_id))
        return gone.rowcount > 0

    def add_test(self, alert: AlertRow, message: Mapping[str, Any]) -> DeliveryRow:
        """Queue a test message. It is tried once."""
        now = self.clock()
        with self._database.write() as connection:
            delivery_id = queue(
                connection,
                message,
                now,
                incident=message["incident"],
                event="test",
                alert_id=alert.id,
                give_up_at=now,
            )
            return _delivery(connection, delivery_id)

    def deliveries(
        self, alert_id: str | None, limit: int, before: int | None = None
    ) -> list[DeliveryRow]:
        """Return the messages of a rule, or of all rules, newest first; only those before
        ``before``, a ``seq``."""
        of_rule = (
            _COLUMNS.alert_id.is_not(None) if alert_id is None else (_COLUMNS.alert_id == alert_id)
        )
        query = DeliveryRow.select(alert_deliveries).where(of_rule)
        if before is not None:
            query = query.where(_COLUMNS.seq < before)
        return self._rows(DeliveryRow, query.order_by(_COLUMNS.seq.desc()).limit(limit))

    def send_again(self, alert_id: str, delivery_id: str) -> DeliveryRow | None:
        """Queue a message again, delivered or not, with the same id; None if there is none."""
        now = self.clock()
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


def queue(connection: Connection, message: Mapping[str, Any], now: float, **columns: Any) -> str:
    """Queue a message in this transaction; return the delivery's id.

    Args:
        connection: Of the transaction of what it reports.
        message: JSON of an ``AlertMessage`` without its id, or of a webhook.
        now: Unix seconds.
        columns: ``incident`` and ``event``, ``run_id`` unless it is a test, ``alert_id`` or the
            ``url`` of a webhook, and what is not as for other messages.
    """
    delivery_id = new_id("dlv", now)
    row = {
        "id": delivery_id,
        "message": dict(message),
        "state": "waiting",
        "num_tries": 0,
        "created_at": now,
        "next_at": now,
        "give_up_at": now + RETRIES_LAST_S,
        **columns,
    }
    connection.execute(insert(alert_deliveries), row)
    return delivery_id


def _delivery(connection: Connection, delivery_id: str) -> DeliveryRow:
    query = DeliveryRow.select(alert_deliveries).where(_COLUMNS.id == delivery_id)
    return DeliveryRow(*connection.execute(query).one())


# ---------------------------------------------------------------- alert incidents

# Apply the alerts of a run's project to it: begin and end incidents, and queue their messages, all
# in the transaction that changes the run.


TELLING_KINDS: Final = frozenset(
    {
        EventKind.RECOVERED,
        EventKind.STRAGGLER,
        EventKind.ATTEMPT_STARTED,
        EventKind.ATTEMPT_ENDED,
    }
)
"""Events after which another alert may hold; so does the end of a run."""
_OVER_TIME: Final = ("recovered", "stalled")
"""What may begin or end without an event."""
_STRAGGLER_EVENTS: Final = 1000


def apply_alerts(
    connection: Connection, run: RunRow, now: float, only: Collection[str] | None = None
) -> None:
    """Begin and end incidents of a run, whose row is locked, and queue their messages.

    Args:
        connection: Of the transaction. Events of the run are in its tables.
        run: The run as it will be.
        now: Unix seconds.
        only: Only rules with these conditions; None for all.
    """
    found = _changes(connection, run, now, _rules(connection, (run.project,), only))
    if not found:
        return
    for alert, facts, change in found:
        key = (alert_incidents.c.alert_id == alert.id, alert_incidents.c.run_id == run.id)
        for subject in change.triggered:
            place = {"alert_id": alert.id, "run_id": run.id, "subject": subject}
            connection.execute(insert(alert_incidents).values(**place, opened_at=now))
        if change.resolved:
            is_over = alert_incidents.c.subject.in_(change.resolved)
            connection.execute(delete(alert_incidents).where(*key, is_over))
        begun: list[tuple[AlertEvent, str]] = [("trigger", each) for each in change.triggered]
        ended: list[tuple[AlertEvent, str]] = [("resolve", each) for each in change.resolved]
        for event, subject in begun + ended:
            message = message_of(alert, run, facts, event=event, subject=subject, now=now)
            queue(
                connection,
                message,
                now,
                incident=message["incident"],
                event=event,
                run_id=run.id,
                alert_id=alert.id,
            )


def queue_webhook(connection: Connection, run: RunRow, event: EventRow) -> None:
    """Queue the webhook for the status that a run has just reached, if its spec wants one."""
    asked = run.stored_spec.notify
    if asked is not None and run.status.value in asked.on:
        queue(
            connection,
            webhook_of(run, event),
            event.at,
            incident=f"{run.id}/{event.seq}",
            event="trigger",
            run_id=run.id,
            url=asked.url,
        )


class IncidentStore(Store):
    """Applies rules whose conditions begin or end as time passes."""

    def work(self) -> None:
        """Apply these rules to every live run of their projects. Raises DatabaseError."""
        now = self.clock()
        with self._database.read() as connection:
            rules = _rules(connection, None, _OVER_TIME)
            if not rules:
                return
            found = connection.execute(RunRow.select(runs).where(IS_LIVE)).all()
            live = map(RunRow.read, found)
            due = [run.id for run in live if _changes(connection, run, now, rules)]
        for run_id in due:
            with self._database.write() as connection:
                locked = RunRow.select(runs).where(runs.c.id == run_id).with_for_update()
                row = connection.execute(locked).one_or_none()
                if row is not None:
                    apply_alerts(connection, RunRow.read(row), now, _OVER_TIME)


def _rules(
    connection: Connection, projects: Iterable[str] | None, only: Collection[str] | None
) -> list[AlertRow]:
    query = AlertRow.select(alerts).order_by(alerts.c.created_at, alerts.c.id)
    if projects is not None:
        query = query.where(alerts.c.project.in_(list(projects)))
    if only is not None:
        query = query.where(alerts.c.when.in_(list(only)))
    return [AlertRow(*row) for row in connection.execute(query)]


def _changes(
    connection: Connection, run: RunRow, now: float, rules: Iterable[AlertRow]
) -> list[tuple[AlertRow, AlertFacts, IncidentChanges]]:
    """Return the rules of the run's project whose incidents change now."""
    mine = [rule for rule in rules if rule.project == run.project]
    if not mine:
        return []
    facts = _facts(connection, run, now, {rule.when for rule in mine})
    query = select(alert_incidents.c.alert_id, alert_incidents.c.subject).where(
        alert_incidents.c.run_id == run.id
    )
    open_ones: dict[str, set[str]] = {}
    for alert_id, subject in connection.execute(query):
        open_ones.setdefault(alert_id, set()).add(subject)
    found = [
        (rule, facts, changes(rule, facts, now, frozenset(open_ones.get(rule.id, ()))))
        for rule in mine
    ]
    return [each for each in found if each[2] != IncidentChanges()]


def _facts(connection: Connection, run: RunRow, now: float, needed: Collection[str]) -> AlertFacts:
    """Return the facts that rules with these conditions need."""
    recovered: list[float] = []
    if "recovered" in needed:
        place = (events.c.run_id == run.id, events.c.kind == EventKind.RECOVERED.value)
        query = select(events.c.at).where(*place, events.c.at > now - HOUR_S)
        recovered = list(connection.execute(query).scalars())
    slow = _stragglers(connection, run) if "straggler" in needed else ()
    progressed_at = _progressed_at(connection, run) if "stalled" in needed else None
    return AlertFacts(
        run.status,
        tuple(recovered),
        slow,
        None if progressed_at is None else past(progressed_at, now),
    )


def _progressed_at(connection: Connection, run: RunRow) -> float | None:
    """Return when the run made its last step, or began to work if that is later; None if it does
    not report steps."""
    code = run.stored_spec.code
    if run.work_ledger is None or (code is not None and code.script is not None and not run.step):
        return None
    began = select(func.max(transitions.c.at)).where(
        transitions.c.run_id == run.id, transitions.c.to_status == RunStatus.STARTING.value
    )
    began_at = connection.execute(began).scalar_one_or_none() or run.created_at
    return max(float(began_at), WorkLedger.load(run.work_ledger).step_at_us / 1e6)


def _stragglers(connection: Connection, run: RunRow) -> tuple[Straggler, ...]:
    """Return the ranks that slow their peers down now, as the newest events of the attempt say:
    this is in the transaction that changes the run, which a long history must not hold up."""
    rows = events_of(
        connection, run.id, straggler_fold.STRAGGLER_KINDS, run.attempt, newest=_STRAGGLER_EVENTS
    )
    report = folded(straggler_fold.stragglers, rows)
    return tuple(each for each in report.stragglers if each.ended_at is None)


# ---------------------------------------------------------------- alert deliveries

# Messages that are due, and what becomes of each try.

KEPT_S: Final = 30 * 86_400.0
"""Messages are kept for so long after their last try."""
_DUE: Final = 40


class DeliveryStore(Store):
    """Messages on their way."""

    def due(self) -> list[tuple[DeliveryRow, AlertRow | None]]:
        """Return messages to send now, the longest due first, each with its rule; None for a
        webhook.

        Messages of one incident are sent in order: one that waits holds up the later ones, so that
        a receiver never resolves what it has not seen yet.
        """
        earlier = alert_deliveries.alias("earlier")
        is_behind = exists().where(
            earlier.c.alert_id == _COLUMNS.alert_id,  # webhooks, which have none, do not wait
            earlier.c.incident == _COLUMNS.incident,
            earlier.c.state == "waiting",
            earlier.c.seq < _COLUMNS.seq,
        )
        # The first try waits for nothing: if it lies ahead, the clock was set back.
        is_due = or_(_COLUMNS.next_at <= self.clock(), _COLUMNS.num_tries == 0)
        query = (
            DeliveryRow.select(alert_deliveries)
            .add_columns(*(alerts.c[name] for name in AlertRow.__dataclass_fields__))
            .outerjoin(alerts, alerts.c.id == _COLUMNS.alert_id)
            .where(_COLUMNS.state == "waiting", is_due, ~is_behind)
            .order_by(_COLUMNS.next_at, _COLUMNS.seq)
            .limit(_DUE)
        )
        width = len(DeliveryRow.__dataclass_fields__)
        with self._database.read() as connection:
            found = connection.execute(query).all()
        return [
            (DeliveryRow(*row[:width]), None if row[width] is None else AlertRow(*row[width:]))
            for row in found
        ]

    def adopt(self) -> None:
        """Queue the webhooks that a service of 0.1.0 has left in its own table."""
        query = select(notifications)
        with self._database.read() as connection:
            if connection.execute(query.limit(1)).first() is None:
                return
        with self._database.write() as connection:
            for left in connection.execute(query).all():
                queue(
                    connection,
                    {**NO_FAILURE, **json.loads(left.body)},
                    left.created_at,
                    incident=f"{left.run_id}/{left.seq}",
                    event="trigger",
                    run_id=left.run_id,
                    url=left.url,
                    next_at=left.next_at,
                    num_tries=left.num_tries,
                )
                key = (notifications.c.run_id == left.run_id, notifications.c.seq == left.seq)
                connection.execute(delete(notifications).where(*key))

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
        old = (_COLUMNS.state != "waiting", _COLUMNS.finished_at < self.clock() - KEPT_S)
        with self._database.read() as connection:
            if connection.execute(select(_COLUMNS.seq).where(*old).limit(1)).first() is None:
                return
        with self._database.write() as connection:
            connection.execute(delete(alert_deliveries).where(*old))
