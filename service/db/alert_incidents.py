"""Apply the alerts of a run's project to it: begin and end incidents, and queue their messages, all
in the transaction that changes the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Final, TypeVar

import structlog
from sqlalchemy import Connection, delete, func, insert, select

from everstep.wire import Failure, RunStatus, Straggler
from everstep.wire.alerts import AlertEvent
from everstep.wire.events import EventKind
from service.db.alert_tables import alert_incidents, alerts
from service.db.alerts import queue
from service.db.engine import Database
from service.db.planner_hints import IS_LIVE
from service.db.tables import events, runs, transitions
from service.model.alert_rows import AlertRow
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from service.projections import failures as failure_fold
from service.projections import stragglers as straggler_fold
from service.projections.alert_messages import message_of
from service.projections.alert_rules import HOUR_S, Changes, RunFacts, changes
from service.projections.fitting import UNFIT
from service.projections.work import WorkLedger

T = TypeVar("T")

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

log = structlog.get_logger(__name__)


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
    facts = found[0][1]
    failures = failures_of(connection, run.id)
    stragglers = _stragglers(connection, run)
    for alert, _, change in found:
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
            message = message_of(
                alert, run, facts, failures, stragglers, event=event, subject=subject, now=now
            )
            queue(connection, alert.id, run.id, event, message, now)


class IncidentStore:
    """Applies rules whose conditions begin or end as time passes. ``clock`` returns unix
    seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def work(self) -> None:
        """Apply these rules to every live run of their projects. Raises DatabaseError."""
        now = self._clock()
        with self._database.read() as connection:
            rules = _rules(connection, None, _OVER_TIME)
            if not rules:
                return
            projects = {rule.project for rule in rules}
            live = [
                RunRow.read(row)
                for row in connection.execute(
                    RunRow.select(runs).where(IS_LIVE, runs.c.project.in_(sorted(projects)))
                )
            ]
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
) -> list[tuple[AlertRow, RunFacts, Changes]]:
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
    return [each for each in found if each[2] != Changes()]


def _facts(connection: Connection, run: RunRow, now: float, needed: Collection[str]) -> RunFacts:
    """Return the facts that rules with these conditions need."""
    recovered: list[float] = []
    if "recovered" in needed:
        place = (events.c.run_id == run.id, events.c.kind == EventKind.RECOVERED.value)
        query = select(events.c.at).where(*place, events.c.at > now - HOUR_S)
        recovered = list(connection.execute(query).scalars())
    slow = _stragglers(connection, run) if "straggler" in needed else ()
    return RunFacts(
        run.status,
        tuple(recovered),
        frozenset(each.rank for each in slow),
        _progressed_at(connection, run) if "stalled" in needed else None,
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


def failures_of(connection: Connection, run_id: str) -> list[Failure]:
    """Return all failures of a run so far, in this transaction; none if its history is invalid."""
    rows = _events(connection, run_id, failure_fold.KINDS)
    return _folded(run_id, failure_fold.failures, rows) or []


def _stragglers(connection: Connection, run: RunRow) -> tuple[Straggler, ...]:
    """Return the ranks that slow their peers down now."""
    rows = _events(connection, run.id, straggler_fold.KINDS, run.attempt)
    report = _folded(run.id, lambda found: straggler_fold.stragglers(found, None), rows)
    found = report.stragglers if report is not None else ()
    return tuple(each for each in found if each.ended_at is None)


def _folded(run_id: str, fold: Callable[[list[EventRow]], T], rows: list[EventRow]) -> T | None:
    """Return what events say together; None if one of them has invalid data.

    User code can write anything into its journal. That must not keep the run from changing.
    """
    try:
        return fold(rows)
    except UNFIT as exc:
        log.error("history_not_understood", run_id=run_id, error=repr(exc))
        return None


def _events(
    connection: Connection, run_id: str, kinds: Collection[str], attempt: int | None = None
) -> list[EventRow]:
    query = select(events).where(events.c.run_id == run_id, events.c.kind.in_(sorted(kinds)))
    if attempt is not None:
        query = query.where(events.c.attempt == attempt)
    found = connection.execute(query.order_by(events.c.seq)).mappings()
    return [EventRow.of(row) for row in found]
