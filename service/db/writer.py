"""The only way to change a run: its row, history and transitions in one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog
from sqlalchemy import Connection, bindparam, insert, select, update

from everstep.wire import Reason, RunStatus
from everstep.wire.events import UNFIT, EventKind
from service.db.engine import replace_rows
from service.db.tables import TableHooks, events, metrics, runs, transitions
from service.model.rows import EventRow, MetricPoint
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict, check_legal
from service.projections.attempts import preempted
from service.projections.changes import NO_WORKERS
from service.projections.goodput import TimeLedger, WorkLedger

logger = structlog.get_logger(__name__)

_LOCKED = RunRow.select(runs).where(runs.c.id == bindparam("run_id")).with_for_update()
_INSERT_RUN, _INSERT_TRANSITIONS = insert(runs), insert(transitions)


class RunWriter:
    """A run's row, locked for this transaction, and the changes to write.

    ``run`` is always the row as it will be; nothing reaches the database before ``save``.
    """

    def __init__(
        self,
        connection: Connection,
        run: RunRow,
        now: float,
        hooks: Sequence[TableHooks],
        *,
        new: bool = False,
    ) -> None:
        self.run = replace(run)
        """This writer's own copy, which ``set`` changes in place; copying it for each event of a
        journal would dominate the cost."""
        self.now = now
        self._connection = connection
        self._hooks = hooks
        self._found = None if new else run
        self._ledger = TimeLedger.load(run.time_ledger)
        self._work = None if run.work_ledger is None else WorkLedger.load(run.work_ledger)
        self._events: list[dict[str, Any]] = []
        self._transitions: list[dict[str, Any]] = []
        self._points: dict[tuple[str, int], MetricPoint] = {}
        self._kinds: set[str] = set()
        self._has_stopped = False

    @classmethod
    def lock(
        cls, connection: Connection, run_id: str, now: float, hooks: Sequence[TableHooks]
    ) -> RunWriter:
        """Read the row for update. Raises TransitionConflict if the run was deleted."""
        row = connection.execute(_LOCKED, {"run_id": run_id}).one_or_none()
        if row is None:
            raise TransitionConflict(run_id, None, "it was deleted")
        return cls(connection, RunRow.read(row), now, hooks)

    def set(self, columns: Mapping[str, Any]) -> None:
        for name, value in columns.items():
            object.__setattr__(self.run, name, value)

    def append(
        self,
        kind: str,
        at: float,
        data: dict[str, Any],
        *,
        submission: int | None = None,
        attempt: int = 0,
    ) -> EventRow:
        """Add an event with the next public ``seq``. ``submission`` None is the run's newest."""
        seq = self.run.last_seq + 1
        row = EventRow(
            seq, at, kind, self.run.submission if submission is None else submission, attempt, data
        )
        try:
            self._ledger.apply(
                row, latest=self.now, is_own_loop=self.run.stored_spec.runs_own_function
            )
            if self._work is not None:
                self._work.apply(row, latest=self.now)
        except UNFIT as exc:
            # As for changes, invalid data must not stop the tail. The time stays in its bucket.
            logger.error(
                "event_not_accounted", run_id=self.run.id, seq=seq, kind=kind, error=repr(exc)
            )
        self._events.append({"run_id": self.run.id, **row.columns()})
        self._kinds.add(kind)
        self.set({"last_seq": seq})
        return row

    def add_points(self, points: tuple[MetricPoint, ...]) -> None:
        """Add metrics. A repeated step replaces its earlier values."""
        for point in points:
            self._points[point.name, point.step] = point

    def visible_id(self, run_id: str) -> str | None:
        """Return another run's id if this run's users may see it; None if it belongs to another
        project."""
        project = self._connection.execute(
            select(runs.c.project).where(runs.c.id == run_id)
        ).scalar_one_or_none()
        return run_id if project == self.run.project else None

    def begin(self) -> None:
        """Add the first entries of a new run's history."""
        data = {"name": self.run.name, "project": self.run.project}
        self.append(EventKind.RUN_CREATED, self.run.created_at, data)
        self._record_status(None, self.run.created_at)

    def change_status(self, to: RunStatus, reason: Reason | None, at: float | None = None) -> None:
        """Change the status, with its event. Raises TransitionConflict if ``to`` may not follow.

        Args:
            to: new status.
            reason: why, if the status alone does not say it; None clears the old reason.
            at: when it happened (unix seconds); None is now. Never earlier than the history's last
                entry.
        """
        before, preempted_by = self.run.status, self.run.preempted_by
        check_legal(self.run.id, before, to)
        if to == RunStatus.PAUSED and preempted_by is not None:
            reason = preempted(self.visible_id(preempted_by))
        columns: dict[str, Any] = {
            "status": RunStatus(to),
            "reason_code": reason.code.value if reason else None,
            # PostgreSQL cannot store NUL in text, and exceptions of user code may contain it.
            "reason_message": reason.message.replace("\0", "\N{REPLACEMENT CHARACTER}")
            if reason
            else None,
        }
        moment = min(self.now, max(self.now if at is None else at, self._ledger.at_us / 1e6))
        if to.terminal:
            columns |= {"finished_at": moment, "preempted_by": None, "shrunk": None, **NO_WORKERS}
        if to == RunStatus.PAUSED:
            columns |= {"stop_requested": None, "stop_requested_at": None, "preempted_by": None}
            columns |= {"shrunk": None, **NO_WORKERS}
            if preempted_by is not None and self.run.attempt:
                columns["restarts"] = self.run.restarts + 1
        self.set(columns)
        self._record_status(before, moment)
        self._has_stopped |= to.terminal or to == RunStatus.PAUSED
        if to == RunStatus.PAUSED and preempted_by is not None:
            # in the same transaction, so that nothing can get lost in between
            self.change_status(RunStatus.QUEUED, reason, moment)

    def _record_status(self, before: RunStatus | None, at: float) -> None:
        run = self.run
        reason = (
            None
            if run.reason_code is None
            else {"code": run.reason_code, "message": run.reason_message}
        )
        event = self.append(
            EventKind.STATUS,
            at,
            {"from": before.value if before else None, "to": run.status.value, "reason": reason},
        )
        for hook in self._hooks:
            if hook.status_changed:
                hook.status_changed(self._connection, run, event)
        self._transitions.append(
            {
                "run_id": run.id,
                "seq": event.seq,
                "from_status": before.value if before else None,
                "to_status": run.status.value,
                "at": at,
                "reason_code": run.reason_code,
                "reason_message": run.reason_message,
            }
        )

    def save(self) -> RunRow:
        """Write everything. Raises TransitionConflict if the row changed since it was read."""
        changed = {
            "time_ledger": self._ledger.dump(),
            "work_ledger": None if self._work is None else self._work.dump(),
            "updated_at": self.now,
            "row_version": self.run.row_version + 1,
        }
        self.set(changed)
        columns = self.run.columns() | {"status": self.run.status.value}
        if self._found is None:
            self._connection.execute(_INSERT_RUN, columns)
        else:
            found = self._found
            # A spec is long and never changes: only write values that are different objects.
            fresh = {
                name: value for name, value in columns.items() if getattr(found, name) is not value
            }
            guarded = (
                update(runs)
                .where(runs.c.id == found.id, runs.c.row_version == found.row_version)
                .values(**fresh)
            )
            if self._connection.execute(guarded).rowcount != 1:
                raise TransitionConflict(
                    self.run.id, self.run.status, "it was changed at the same time; try again"
                )
        self._found = replace(self.run)
        if self._events:
            self._connection.execute(insert(events), self._events)
        if self._transitions:
            self._connection.execute(_INSERT_TRANSITIONS, self._transitions)
        if self._points:
            self._upsert_points()
        for hook in self._hooks:
            if hook.run_changed and (self._has_stopped or self._kinds & hook.run_events):
                hook.run_changed(self._connection, self.run, self.now)
        self._events, self._transitions, self._points = [], [], {}
        self._kinds, self._has_stopped = set(), False
        return self.run

    def _upsert_points(self) -> None:
        rows = (
            {
                "run_id": self.run.id,
                "name": point.name,
                "step": point.step,
                "at": point.at,
                "value": point.value,
            }
            for point in self._points.values()
        )
        replace_rows(self._connection, metrics, *rows)
