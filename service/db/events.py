"""Histories of runs: read events in order, and apply journals."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
from sqlalchemy import (
    ColumnElement,
    Connection,
    LargeBinary,
    Text,
    asc,
    cast,
    desc,
    func,
    or_,
    select,
)

from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from service.db.engine import Database
from service.db.errors import DatabaseError
from service.db.tables import checkpoint_checks, events, runs
from service.db.writer import RunWriter
from service.model.rows import CheckpointCheck, EventRow
from service.model.run_rows import RunRow
from service.projections.changes import Changes
from service.projections.fitting import UNFIT, checked
from service.projections.handlers import project
from storage.logs.journal_line import JournalEvent
from storage.run_names import CheckpointName

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


class EventStore:
    """Events and checkpoint checks of runs. ``clock`` returns unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

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
            writer = RunWriter.lock(connection, run_id, self._clock())
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
        query = (
            select(events)
            .where(events.c.run_id == run_id, events.c.seq > seq)
            .order_by(events.c.seq)
            .limit(limit)
        )
        if kinds is not None:
            query = query.where(events.c.kind.in_(sorted(kinds)))
        with self._database.read() as connection:
            return [EventRow.of(row) for row in connection.execute(query).mappings()]

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
        ``most_bytes``; it has at least one event if there is any. The database sums the sizes, so
        no more than that is ever read.
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
        run = places[0]
        if kinds is not None:
            places.append(events.c.kind.in_(sorted(kinds)))
        first = (
            select(events.c.seq, self._data_bytes().label("bytes"))
            .where(*places)
            .order_by(order(events.c.seq))
            .limit(limit + 1)
            .subquery()
        )
        place = func.row_number().over(order_by=order(first.c.seq)).label("place")
        total = func.sum(first.c.bytes).over(order_by=order(first.c.seq)).label("total")
        summed = select(first.c.seq, place, total, func.count().over().label("num")).subquery()
        query = (
            select(events, summed.c.num)
            .join(summed, events.c.seq == summed.c.seq)
            .where(run, summed.c.place <= limit)
            .where(or_(summed.c.total <= most_bytes, summed.c.place == 1))
            .order_by(order(events.c.seq))
        )
        with self._database.read() as connection:
            found = connection.execute(query).mappings().all()
        rows = tuple(EventRow.of(row) for row in found)
        return EventPage(rows, more=bool(found) and found[0]["num"] > len(rows))

    def _data_bytes(self) -> ColumnElement[int]:
        if self._database.is_sqlite:
            return func.length(cast(events.c.data, LargeBinary))
        return func.octet_length(cast(events.c.data, Text))

    def of_kinds(self, run_id: str, kinds: Collection[str]) -> list[EventRow]:
        """Return every event of these kinds, in order."""
        query = (
            select(events)
            .where(events.c.run_id == run_id, events.c.kind.in_(sorted(kinds)))
            .order_by(events.c.seq)
        )
        with self._database.read() as connection:
            return [EventRow.of(row) for row in connection.execute(query).mappings()]

    def newest(self, run_id: str, kind: str, limit: int = 1) -> list[EventRow]:
        """Return the last events of a kind, newest first."""
        query = (
            select(events)
            .where(events.c.run_id == run_id, events.c.kind == kind)
            .order_by(events.c.seq.desc())
            .limit(limit)
        )
        with self._database.read() as connection:
            return [EventRow.of(row) for row in connection.execute(query).mappings()]

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
        query = select(checkpoint_checks).where(checkpoint_checks.c.run_id == run_id)
        with self._database.read() as connection:
            return {
                row["name"]: CheckpointCheck.of(row) for row in connection.execute(query).mappings()
            }

    def record_check(
        self, run_id: str, name: str, problem: str | None, found_by: Literal["scrub", "verify"]
    ) -> CheckpointCheck:
        """Record that a checkpoint was verified just now, and its problem, if any.

        New damage becomes an event of the run, unless it has ended: nothing follows the end of a
        history. Raises TransitionConflict if the run was deleted.
        """
        check = CheckpointCheck(name, self._clock(), problem)
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, check.verified_at)
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


def _write_check(connection: Connection, run_id: str, check: CheckpointCheck) -> bool:
    """Store a check. Return whether the previous check had already found the checkpoint corrupt."""
    checks = checkpoint_checks.c
    key = (checks.run_id == run_id, checks.name == check.name)
    before = connection.execute(select(checks.problem).where(*key)).one_or_none()
    values = {"verified_at": check.verified_at, "problem": check.problem}
    if before is None:
        connection.execute(
            checkpoint_checks.insert().values(run_id=run_id, name=check.name, **values)
        )
    else:
        connection.execute(checkpoint_checks.update().where(*key).values(values))
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
