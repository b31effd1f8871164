"""Histories of runs: read events in order, and apply journals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import structlog
from sqlalchemy import (
    ColumnElement,
    Connection,
    LargeBinary,
    Select,
    Text,
    asc,
    cast,
    desc,
    func,
    or_,
    select,
)

from everstep.wire import Failure, RunStatus
from everstep.wire.events import UNFIT, EventKind
from service.db.engine import DatabaseError, Store, replace_rows
from service.db.tables import checkpoint_checks, events, metrics, runs
from service.db.writer import RunWriter
from service.model.rows import CheckpointCheck, EventRow, MetricPoint
from service.model.run_rows import RunRow
from service.projections import attempts
from service.projections.changes import Changes
from service.projections.handlers import checked, folded, project
from storage.logs.journal import JournalEvent
from storage.run_dir import CheckpointName

logger = structlog.get_logger(__name__)


PAGE_BYTES = 8 << 20
"""Maximum size of the data of a page's events together; a single event may have as much."""


@dataclass(frozen=True)
class EventPage:
    """Some events of a run in order, and whether more follow."""

    rows: tuple[EventRow, ...]
    more: bool


class JournalGap(DatabaseError):
    """Events are missing between the applied ones and this batch. Read the journal again from the
    stored cursor."""


class EventStore(Store):
    """Events and checkpoint checks of runs."""

    # ---------------------------------------------------------------- journals

    def apply_journal(
        self, run_id: str, submission: int, batch: Sequence[JournalEvent], cursor: str
    ) -> RunRow:
        """Apply events of a submission's journal, and the cursor after them, in one transaction.

        Applying a batch again, wholly or in part, changes nothing: events are counted by their
        position ``n`` in the journal. Events of a submission are ignored once a successor's journal
        was started, and so is everything after a run has ended.

        Args:
            run_id: the run.
            submission: submission of the journal.
            batch: events in journal order.
            cursor: where to continue reading after them.

        Returns:
            The run as it is now.

        Raises:
            TransitionConflict: the run was deleted.
            JournalGap: the batch starts after the next event.
        """
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self.clock(), self._database.hooks)
            run = writer.run
            if not run.journal_submission <= submission <= run.submission or run.status.terminal:
                return run
            if run.journal_submission != submission:
                writer.set(
                    {"journal_submission": submission, "journal_n": 0, "journal_cursor": None}
                )
            fresh = [event for event in batch if event.n > writer.run.journal_n]
            if not fresh and (batch or cursor == writer.run.journal_cursor):
                return run
            for event in fresh:
                if event.n != writer.run.journal_n + 1:
                    raise JournalGap(
                        f"journal of {run_id} s{submission:03d}: event {event.n} follows "
                        f"{writer.run.journal_n}"
                    )
                _apply(writer, event)
                if event.kind == EventKind.RESTORED:
                    _record_rejected(connection, run_id, event)
            writer.set({"journal_cursor": cursor})
            return writer.save()

    # ---------------------------------------------------------------- reading

    def after(
        self, run_id: str, seq: int, limit: int, kinds: Collection[str] | None = None
    ) -> list[EventRow]:
        """Return events after ``seq`` in order, at most ``limit``, and only of these kinds, if
        given."""
        query = EventRow.select(events).where(events.c.run_id == run_id, events.c.seq > seq)
        if kinds is not None:
            query = query.where(events.c.kind.in_(sorted(kinds)))
        return self._rows(EventRow, query.order_by(events.c.seq).limit(limit))

    def page(
        self,
        run_id: str,
        seq: int,
        limit: int,
        kinds: Collection[str] | None = None,
        most_bytes: int = PAGE_BYTES,
    ) -> EventPage:
        """Return the next events after ``seq``, in order, and whether there are more.

        A page ends at ``limit`` events, or before the event with which their data would exceed
        ``most_bytes``; it has at least one event if there is any.
        """
        return self._page(
            [events.c.run_id == run_id, events.c.seq > seq], limit, kinds, asc, most_bytes
        )

    def page_before(
        self, run_id: str, seq: int | None, limit: int, kinds: Collection[str] | None = None
    ) -> EventPage:
        """Return the last events before ``seq``, newest first, and whether there are older ones.

        ``seq`` None means the newest of all. A page ends as that of ``page``.
        """
        places = [events.c.run_id == run_id]
        if seq is not None:
            places.append(events.c.seq < seq)
        return self._page(places, limit, kinds, desc)

    def _page(
        self,
        places: list[ColumnElement[bool]],
        limit: int,
        kinds: Collection[str] | None,
        order: Callable[[ColumnElement[int]], ColumnElement[int]],
        most_bytes: int = PAGE_BYTES,
    ) -> EventPage:
        """Return a page of the events at these places, in this order."""
        if kinds is not None:
            places.append(events.c.kind.in_(sorted(kinds)))
        query = EventRow.select(events).add_columns(self._data_bytes()).where(*places)
        query = query.order_by(order(events.c.seq)).limit(limit + 1)
        rows: list[EventRow] = []
        with self._database.read() as connection:
            # read one after the other: a page's events may have gigabytes together
            options = {"stream_results": True, "max_row_buffer": 16}
            with connection.execute(query, execution_options=options) as found:
                for *row, num_bytes in found:
                    most_bytes -= num_bytes
                    if len(rows) == limit or (rows and most_bytes < 0):
                        return EventPage(tuple(rows), more=True)
                    rows.append(EventRow(*row))
        return EventPage(tuple(rows), more=False)

    def _data_bytes(self) -> ColumnElement[int]:
        if self._database.is_sqlite:
            return func.length(cast(events.c.data, LargeBinary))
        return func.octet_length(cast(events.c.data, Text))

    def of_kinds(self, run_id: str, kinds: Collection[str]) -> list[EventRow]:
        """Return every event of these kinds, in order."""
        with self._database.read() as connection:
            return events_of(connection, run_id, kinds)

    def failures(self, run_id: str, until: int | None = None) -> list[Failure]:
        """Return all failures of a run, or those up to an event. They are folded here, after the
        transaction: a long history takes seconds."""
        rows = self.of_kinds(run_id, attempts.FAILURE_KINDS)
        return folded(attempts.failures, [row for row in rows if until is None or row.seq <= until])

    def newest(self, run_id: str, kind: str, limit: int = 1) -> list[EventRow]:
        """Return the last events of a kind, newest first."""
        query = EventRow.select(events).where(events.c.run_id == run_id, events.c.kind == kind)
        return self._rows(EventRow, query.order_by(events.c.seq.desc()).limit(limit))

    def heads(self, run_ids: Collection[str]) -> dict[str, tuple[int, str]]:
        """Return (last seq, status) of each of these runs. Deleted runs are left out."""
        query = select(runs.c.id, runs.c.last_seq, runs.c.status).where(
            runs.c.id.in_(list(run_ids))
        )
        with self._database.read() as connection:
            return {
                run_id: (last_seq, status) for run_id, last_seq, status in connection.execute(query)
            }

    # ---------------------------------------------------------------- checks of checkpoints

    def checkpoint_checks(self, run_id: str) -> dict[str, CheckpointCheck]:
        """Return the last check of each checkpoint that was ever verified, by name."""
        query = CheckpointCheck.select(checkpoint_checks)
        found = self._rows(CheckpointCheck, query.where(checkpoint_checks.c.run_id == run_id))
        return {check.name: check for check in found}

    def record_check(
        self, run_id: str, name: str, problem: str | None, found_by: Literal["scrub", "verify"]
    ) -> CheckpointCheck:
        """Record that a checkpoint was verified just now, and its problem, if any.

        New damage becomes an event of the run, unless it has ended: nothing follows the end of a
        history. Raises TransitionConflict if the run was deleted.
        """
        check = CheckpointCheck(name, self.clock(), problem)
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, check.verified_at, self._database.hooks)
            known = _write_check(connection, run_id, check)
            if problem and not known and not writer.run.status.terminal:
                parsed = CheckpointName.parse(name)
                data = {
                    "step": parsed.step if parsed else None,
                    "name": name,
                    "problem": problem,
                    "found_by": found_by,
                }
                row = writer.append(EventKind.CHECKPOINT_CORRUPT, check.verified_at, data)
                writer.set(_changes(writer.run, row).columns)
                writer.save()
        return check


def events_of(
    connection: Connection,
    run_id: str,
    kinds: Collection[str],
    attempt: int | None = None,
    newest: int | None = None,
) -> list[EventRow]:
    """Return the events of a run that have these kinds, in order; only of one attempt, and only the
    ``newest``, if given."""
    query = EventRow.select(events).where(
        events.c.run_id == run_id, events.c.kind.in_(sorted(kinds))
    )
    if attempt is not None:
        query = query.where(events.c.attempt == attempt)
    if newest is None:
        return [EventRow(*row) for row in connection.execute(query.order_by(events.c.seq))]
    found = connection.execute(query.order_by(events.c.seq.desc()).limit(newest)).all()
    return [EventRow(*row) for row in reversed(found)]


def _write_check(connection: Connection, run_id: str, check: CheckpointCheck) -> bool:
    """Store a check. Return whether the previous check had already found the checkpoint corrupt."""
    checks = checkpoint_checks.c
    key = (checks.run_id == run_id, checks.name == check.name)
    before = connection.execute(select(checks.problem).where(*key)).one_or_none()
    replace_rows(connection, checkpoint_checks, {"run_id": run_id, **check.columns()})
    return before is not None and before.problem is not None


def _record_rejected(connection: Connection, run_id: str, event: JournalEvent) -> None:
    """Record the checkpoints that a restore found corrupt."""
    given = event.data.get("rejected")
    for rejected in given if isinstance(given, list) else ():
        if isinstance(rejected, dict) and CheckpointName.parse(str(rejected.get("name"))):
            _write_check(
                connection,
                run_id,
                CheckpointCheck(rejected["name"], event.at, str(rejected.get("problem"))),
            )


def _apply(writer: RunWriter, event: JournalEvent) -> None:
    row = writer.append(
        str(event.kind), event.at, event.data, submission=event.submission, attempt=event.attempt
    )
    changes = _changes(writer.run, row)
    writer.set({**changes.columns, "journal_n": event.n})
    writer.add_points(changes.points)
    # An old driver's report is true for its submission, but the run has continued since.
    passing = (RunStatus.RUNNING, RunStatus.PAUSED)
    of_the_past = event.submission < writer.run.submission and changes.status in passing
    if changes.status is not None and not of_the_past:
        writer.change_status(changes.status, changes.reason, at=event.at)


def _changes(run: RunRow, event: EventRow) -> Changes:
    """Return the effect of an event. An event with invalid data stays in the history without
    effect.

    It must not stop the tail: later events still describe the run.
    """
    try:
        return checked(project(run, event))
    except UNFIT as exc:
        logger.error(
            "event_not_understood", run_id=run.id, seq=event.seq, kind=event.kind, error=repr(exc)
        )
        return Changes()


# ---------------------------------------------------------------- series

# Time series of metrics, down-sampled in the database: of a million points, only those that are
# shown are read.

Point = tuple[int, float, float | None]
"""(step, unix seconds, value); None was not finite."""
MIN_POINTS = 4


class SeriesStore(Store):
    """Metrics of runs, by name and step."""

    def names(self, run_id: str) -> list[str]:
        """Return every metric that the run ever reported, in order. One index seek each, however
        many points there are."""
        mine = metrics.c.run_id == run_id
        first = (
            select(func.min(metrics.c.name).label("name")).where(mine).cte("known", recursive=True)
        )
        behind = (
            select(func.min(metrics.c.name))
            .where(mine, metrics.c.name > first.c.name)
            .scalar_subquery()
        )
        known = first.union_all(select(behind).where(first.c.name.is_not(None)))
        with self._database.read() as connection:
            return [
                name
                for name in connection.execute(select(known.c.name)).scalars()
                if name is not None
            ]

    def behind(self, run_id: str, name: str, step: int, most: int) -> list[MetricPoint]:
        """Return the first ``most`` points of a metric behind a step, none left out."""
        query = _series(run_id, name).where(metrics.c.step > step).order_by(metrics.c.step)
        with self._database.read() as connection:
            return [MetricPoint(name, *point) for point in _rows(connection, query.limit(most))]

    def points(self, run_id: str, name: str, most: int | None = None) -> list[MetricPoint]:
        """Return a metric by step. A series of more than ``most`` points is down-sampled; its ends,
        the extremes of each part, and values that were not finite are kept."""
        query = _series(run_id, name).order_by(metrics.c.step)
        with self._database.read() as connection:
            found = _rows(connection, query if most is None else query.limit(most + 1))
            if most is not None and len(found) > most:
                [last] = _rows(
                    connection, _series(run_id, name).order_by(metrics.c.step.desc()).limit(1)
                )
                query = _outstanding(run_id, name, found[0][0], last[0], most)
                # of the fewest points, those that are not finite go first
                found = _rows(connection, query)
                if len(found) > most:
                    found = [each for each in found if each[2] is not None or each == last]
        return [MetricPoint(name, *point) for point in found]


def _series(run_id: str, name: str) -> Select[Any]:
    return select(metrics.c.step, metrics.c.at, metrics.c.value).where(
        metrics.c.run_id == run_id, metrics.c.name == name
    )


def _rows(connection: Connection, query: Select[Any]) -> list[Point]:
    return [(step, at, value) for step, at, value in connection.execute(query)]


def _outstanding(run_id: str, name: str, first: int, last: int, most: int) -> Select[Any]:
    """Return the query for candidate points by step: both ends of the series, and of each part its
    largest value, its smallest, and one that is not finite."""
    width = -(-(last - first + 1) // max(1, (most - 2) // 3))
    mine, value = (metrics.c.run_id == run_id, metrics.c.name == name), metrics.c.value
    part = (metrics.c.step - first) // width
    parts = (
        select(part.label("part"), func.min(value).label("least"), func.max(value).label("most"))
        .where(*mine)
        .group_by("part")
        .subquery()
    )
    picked = (
        select(func.min(metrics.c.step))
        .join(parts, part == parts.c.part)
        .where(*mine, or_(value.in_((parts.c.least, parts.c.most)), value.is_(None)))
        .group_by(parts.c.part, value)
    )
    return (
        _series(run_id, name)
        .where(or_(metrics.c.step.in_((first, last)), metrics.c.step.in_(picked)))
        .order_by(metrics.c.step)
    )
