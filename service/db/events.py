"""Histories of runs: events in order, and journals applied to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
from sqlalchemy import ColumnElement, Connection, LargeBinary, Text, cast, func, or_, select

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
"""Most bytes of data that the events of one page have together; one event alone may have as
many."""


@dataclass(frozen=True)
class EventPage:
    """Some events of a run in order, and whether there are more behind them."""

    rows: tuple[EventRow, ...]
    more: bool


class JournalGap(DatabaseError):
    """Events are missing between what was applied and this batch: read the journal again from the
    stored cursor."""


class EventStore:
    """Events and checkpoint checks of runs. ``clock`` gives unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    # ---------------------------------------------------------------- journals

    def apply_journal(
        self, run_id: str, submission: int, batch: Sequence[JournalEvent], cursor: str
    ) -> RunRow:
        """Apply what a submission's journal says, and the cursor behind it, in one transaction.

        Applying a batch again, wholly or in part, changes nothing: events are counted by their
        place ``n`` in the journal. Nothing of a submission whose successor's journal was begun
        with, and nothing after a run has ended, is taken.

        Args:
            run_id: The run.
            submission: Whose journal it is.
            batch: Events in journal order.
            cursor: Where to read on after them.

        Returns:
            The run as it now is.

        Raises:
            TransitionConflict: The run is gone.
            JournalGap: The batch begins behind the next event.
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
        """Events behind ``seq`` in order, at most ``limit``; of these kinds only, where given."""
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
        self, run_id: str, seq: int, limit: int, kinds: Collection[str] | None = None
    ) -> EventPage:
        """The next events behind ``seq``, in order, and whether there are more.

        A page ends at ``limit`` events, or before the one with which their data would be more than
        PAGE_BYTES; it has at least one where there is one. The database adds up, so that no more
        than that is ever read.
        """
        places = [events.c.run_id == run_id, events.c.seq > seq]
        if kinds is not None:
            places.append(events.c.kind.in_(sorted(kinds)))
        first = (
            select(events.c.seq, self._data_bytes().label("bytes"))
            .where(*places)
            .order_by(events.c.seq)
            .limit(limit + 1)
            .subquery()
        )
        place = func.row_number().over(order_by=first.c.seq).label("place")
        total = func.sum(first.c.bytes).over(order_by=first.c.seq).label("total")
        summed = select(first.c.seq, place, total, func.count().over().label("num")).subquery()
        query = (
            select(events, summed.c.num)
            .join(summed, events.c.seq == summed.c.seq)
            .where(events.c.run_id == run_id, summed.c.place <= limit)
            .where(or_(summed.c.total <= PAGE_BYTES, summed.c.place == 1))
            .order_by(events.c.seq)
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
        """Every event of these kinds, in order."""
        query = (
            select(events)
            .where(events.c.run_id == run_id, events.c.kind.in_(sorted(kinds)))
            .order_by(events.c.seq)
        )
        with self._database.read() as connection:
            return [EventRow.of(row) for row in connection.execute(query).mappings()]

    def newest(self, run_id: str, kind: str, limit: int = 1) -> list[EventRow]:
        """The last events of a kind, newest first."""
        query = (
            select(events)
            .where(events.c.run_id == run_id, events.c.kind == kind)
            .order_by(events.c.seq.desc())
            .limit(limit)
        )
        with self._database.read() as connection:
            return [EventRow.of(row) for row in connection.execute(query).mappings()]

    def heads(self, run_ids: Collection[str]) -> dict[str, tuple[int, str]]:
        """(last seq, status) of each of these runs; a run that is gone is left out."""
        query = select(runs.c.id, runs.c.last_seq, runs.c.status).where(
            runs.c.id.in_(list(run_ids))
        )
        with self._database.read() as connection:
            return {
                run_id: (last_seq, status) for run_id, last_seq, status in connection.execute(query)
            }

    # ---------------------------------------------------------------- checks of checkpoints

    def checkpoint_checks(self, run_id: str) -> dict[str, CheckpointCheck]:
        """The last check of each checkpoint that was ever checked, by name."""
        query = select(checkpoint_checks).where(checkpoint_checks.c.run_id == run_id)
        with self._database.read() as connection:
            return {
                row["name"]: CheckpointCheck.of(row) for row in connection.execute(query).mappings()
            }

    def record_check(
        self, run_id: str, name: str, problem: str | None, found_by: Literal["scrub", "verify"]
    ) -> CheckpointCheck:
        """Remember that a checkpoint was read back just now, and what was wrong with it.

        Damage that was not known is an event of the run, unless that has ended: nothing comes
        behind a history's end. Raises TransitionConflict where the run is gone.
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
    """Whether the check before it had found the checkpoint to be corrupt already."""
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
    """A restore read these checkpoints back, too."""
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
    # Of a driver that is lost, or was given up before it had left: what ended is told truly, but
    # the run has gone on since.
    passing = (RunStatus.RUNNING, RunStatus.PAUSED)
    of_the_past = event.submission < writer.run.submission and changes.status in passing
    if changes.status is not None and not of_the_past:
        writer.change_status(changes.status, changes.reason, at=event.at)


def _changes(run: RunRow, event: EventRow) -> Changes:
    """What the event means; one whose data is not as everstep/wire/events.py says stays in the
    history and means nothing.

    It must not stop the tail: what comes behind it still tells how the run goes.
    """
    try:
        return checked(project(run, event))
    except UNFIT as exc:
        logger.error(
            "event_not_understood", run_id=run.id, seq=event.seq, kind=event.kind, error=repr(exc)
        )
        return Changes()
