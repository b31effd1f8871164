"""Runs in the database: created, stopped, resumed and deleted at users' requests. Every method is
one transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from everstep.spec.run_spec import RunSpec
from everstep.wire import Reason, RunStatus
from everstep.wire.events import EventKind
from everstep.wire.run import Replay
from service.db.audit import note_target
from service.db.checkpoints import CheckpointRecords, awaited_in, hold_origin
from service.db.engine import Database, DatabaseError
from service.db.ids import IdempotencyKey, known_run, new_id, remember, used
from service.db.node_marks import StorageRecords
from service.db.projects import join_queue
from service.db.run_lookup import find_run
from service.db.run_queries import RunQueries
from service.db.tables import run_tags, runs, tokens
from service.db.writer import RunWriter
from service.model.rows import TransitionRow
from service.model.run_rows import RunRow
from service.model.states import LIVE, SUBMITTED, TransitionConflict
from service.projections.attempts import cancelled_by_user, paused_by_user, preempted
from service.projections.changes import NO_WORKERS
from service.projections.goodput import TimeLedger, WorkLedger
from storage.run_control import Stop

# ---------------------------------------------------------------- new run

# The row and the first transition of a new run.


def new_row(
    run_id: str,
    spec: RunSpec,
    created_by: str,
    now: float,
    owner: str | None = None,
) -> RunRow:
    """Return the row of a new run, which the token ``created_by`` of ``owner`` submits."""
    return RunRow(
        id=run_id,
        name=spec.name,
        project=spec.project,
        priority=spec.priority,
        tags=dict(spec.tags),
        spec=spec.model_dump(mode="json"),
        created_by=created_by,
        owner=owner,
        time_ledger=TimeLedger.begin(now).dump(),
        work_ledger=WorkLedger.begin(spec.scaling, now).dump(),
        replay_of=None
        if spec.replay is None
        else Replay(
            run_id=spec.replay.run_id,
            from_step=spec.replay.from_step,
            to_step=spec.replay.to_step,
        ).model_dump(mode="json"),
        replayed_run=None if spec.replay is None else spec.replay.run_id,
        created_at=now,
        updated_at=now,
    )


def first_transition(run: RunRow) -> TransitionRow:
    """Return the only transition of a new run."""
    return TransitionRow(run.id, run.last_seq, None, run.status.value, run.created_at, None, None)


# ---------------------------------------------------------------- run changes

# Changes of runs by the reconciler, each guarded by the state that it saw.

_SAY: Final = (
    update(runs)
    .where(runs.c.id == bindparam("run_id"), runs.c.status == bindparam("expected"))
    .values(
        reason_code=bindparam("code"),
        reason_message=bindparam("message"),
        updated_at=bindparam("now"),
        row_version=runs.c.row_version + 1,
    )
)


class RunChanges(RunQueries):
    """Updates that raise TransitionConflict if the run is not in the expected state."""

    def _locked(self, connection: Connection, run_id: str) -> RunWriter:
        """Return the run's writer. Raises TransitionConflict if the run was deleted."""
        return RunWriter.lock(connection, run_id, self.clock(), self._database.hooks)

    def transition(
        self,
        run_id: str,
        expected: RunStatus | Iterable[RunStatus],
        to: RunStatus,
        reason: Reason | None = None,
        *,
        submission: int | None = None,
        at: float | None = None,
        columns: Mapping[str, Any] | None = None,
        wanted: str | None = None,
    ) -> RunRow:
        """Change a run's status if it still is what the caller saw.

        Args:
            run_id: the run.
            expected: status, or statuses, in which the change is valid.
            to: new status.
            reason: why; None clears the old reason.
            submission: submission that the caller saw; None does not check.
            at: when it happened (unix seconds); None is now.
            columns: further columns of the row to set.
            wanted: what to say to a run in another status.

        Raises:
            TransitionConflict: the run was deleted or changed, or ``to`` may not follow its status.
        """
        allowed = frozenset({expected}) if isinstance(expected, RunStatus) else frozenset(expected)
        with self._database.write() as connection:
            writer = self._locked(connection, run_id)
            _expect(writer.run, allowed, submission, wanted or f"it cannot become {to}")
            writer.set(columns or {})
            writer.change_status(to, reason, at)
            return writer.save()

    def claim_submission(
        self, run_id: str, expected_submission: int, workers_limit: int | None = None
    ) -> RunRow:
        """Take the next submission number. From now on only it counts; events of older submissions
        are ignored.

        A QUEUED run becomes STARTING with at most ``workers_limit`` ranks; a running one becomes
        RECOVERING with its current limit. Raises TransitionConflict if another submission was
        claimed meanwhile, or the run is stopping, paused or ended.
        """
        with self._database.write() as connection:
            writer = self._locked(connection, run_id)
            claimable = LIVE - {RunStatus.STOPPING}
            _expect(
                writer.run,
                claimable,
                expected_submission,
                f"submission {expected_submission + 1} cannot be claimed",
            )
            before = writer.run.status
            writer.set(
                {
                    "submission": expected_submission + 1,
                    "ray_job_id": None,
                    "submitted_at": None,
                    **NO_WORKERS,
                }
            )
            if before == RunStatus.QUEUED:
                writer.set({"workers_limit": workers_limit})
                writer.change_status(RunStatus.STARTING, None)
            elif before == RunStatus.RUNNING or (
                before == RunStatus.STARTING and writer.run.attempt > 0
            ):
                writer.change_status(RunStatus.RECOVERING, None)
            return writer.save()

    def record_job(self, run_id: str, submission: int, ray_job_id: str) -> RunRow:
        """Store the Ray job of a submission. Raises TransitionConflict if a newer one was
        claimed."""
        with self._database.write() as connection:
            writer = self._locked(connection, run_id)
            _expect(writer.run, SUBMITTED, submission, "its job cannot be recorded")
            writer.set({"ray_job_id": ray_job_id, "submitted_at": self.clock()})
            return writer.save()

    def adopt(self, run_id: str, storage_id: str, newest: int, *, is_short: bool) -> RunRow:
        """Match a run that has not ended to an adopted storage, and record that in its history.

        Args:
            run_id: the run.
            storage_id: id of the storage.
            newest: newest submission with a journal there. If the database does not know it, it
                counts from now on, and the run has the status of one whose job may run: its journal
                says how it went.
            is_short: whether the storage lacks data that the database knows. The database then
                forgets it.

        Raises TransitionConflict if the run was deleted.
        """
        with self._database.write() as connection:
            writer = self._locked(connection, run_id)
            before = writer.run.submission
            if writer.run.status.terminal:
                return writer.run
            if newest > before:
                if writer.run.status == RunStatus.PAUSED:
                    writer.change_status(RunStatus.QUEUED, None)
                if writer.run.status == RunStatus.QUEUED:
                    writer.change_status(RunStatus.STARTING, None)
                writer.set({"submission": newest, "ray_job_id": f"{run_id}-s{newest:03d}"})
            if is_short:
                writer.set({"journal_submission": 0, "journal_cursor": None, "journal_n": 0})
                writer.set({"recent_checkpoints": [], "latest_checkpoint": None})
            data = {
                "storage_id": storage_id,
                "submission_before": before,
                "submission": max(newest, before),
                "lost": is_short,
            }
            writer.append(EventKind.STORAGE_ADOPTED, self.clock(), data)
            return writer.save()

    def preempt(self, run_id: str, submission: int, by: str) -> RunRow:
        """Request a pause for run ``by`` of a higher priority. Once paused, the run queues again in
        the same transaction.

        Raises TransitionConflict if it is already stopping, has another submission, or is not on
        the cluster.
        """
        with self._database.write() as connection:
            writer = self._locked(connection, run_id)
            _expect(
                writer.run, SUBMITTED - {RunStatus.STOPPING}, submission, "it cannot be preempted"
            )
            writer.set(
                {"stop_requested": "pause", "stop_requested_at": self.clock(), "preempted_by": by}
            )
            writer.append(EventKind.STOP_REQUESTED, self.clock(), {"stop": "pause"})
            writer.change_status(RunStatus.STOPPING, preempted(writer.visible_id(by)))
            return writer.save()

    def shrink(self, run_id: str, submission: int, to: int, by: str) -> RunRow:
        """Limit a run to ``to`` ranks until ``unshrink``, for run ``by`` of a higher priority.

        Raises TransitionConflict if it is stopping, has another submission, or is not on the
        cluster.
        """
        with self._database.write() as connection:
            writer = self._locked(connection, run_id)
            _expect(writer.run, SUBMITTED - {RunStatus.STOPPING}, submission, "it cannot be shrunk")
            writer.set({"shrunk": {"to": to, "by": by, "at": self.clock()}})
            writer.append(
                EventKind.WORKERS_LIMITED,
                self.clock(),
                {"limit": to, "by": writer.visible_id(by) or "of another project"},
            )
            return writer.save()

    def unshrink(self, run_id: str, submission: int) -> RunRow:
        """Remove the limit of ``shrink``. Raises TransitionConflict as ``shrink``."""
        with self._database.write() as connection:
            writer = self._locked(connection, run_id)
            _expect(
                writer.run, SUBMITTED - {RunStatus.STOPPING}, submission, "it cannot grow again"
            )
            if writer.run.shrunk is None:
                return writer.run
            writer.set({"shrunk": None})
            writer.append(
                EventKind.WORKERS_LIMITED,
                self.clock(),
                {"limit": writer.run.workers_limit, "by": None},
            )
            return writer.save()

    def set_reason(self, run_id: str, expected: RunStatus, reason: Reason | None) -> None:
        """Set or clear the reason why a run waits in its status. Does nothing if the status has
        changed."""
        self.set_reasons([(run_id, expected, reason)])

    def set_reasons(self, reasons: Sequence[tuple[str, RunStatus, Reason | None]]) -> None:
        """Set reasons of several runs, as (run id, expected status, reason). They are not part of
        the history."""
        now = self.clock()
        values = [
            {"run_id": run_id, "expected": expected.value, "now": now}
            | (
                {"code": None, "message": None}
                if reason is None
                else {"code": reason.code.value, "message": reason.message}
            )
            for run_id, expected, reason in reasons
        ]
        with self._database.write() as connection:
            connection.execute(_SAY, values)


def _expect(
    run: RunRow, allowed: Collection[RunStatus], submission: int | None, wanted: str
) -> None:
    if run.status not in allowed:
        raise TransitionConflict(run.id, run.status, wanted)
    if submission is not None and run.submission != submission:
        raise TransitionConflict(
            run.id, run.status, f"{wanted}: its submission is {run.submission}, not {submission}"
        )


# ---------------------------------------------------------------- runs

_CREATE_ATTEMPTS: Final = 5
_OWNER: Final = select(func.coalesce(tokens.c.owner, tokens.c.name)).where(
    tokens.c.id == bindparam("token_id")
)


class RunStore(RunChanges):
    """Runs and their states. ``clock`` returns unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        super().__init__(database, clock)
        self.checkpoints = CheckpointRecords(database)
        self.storage = StorageRecords(database, clock)

    def create(
        self,
        spec: RunSpec,
        created_by: str,
        idempotency: IdempotencyKey | None = None,
        *,
        create_project: bool = True,
        owner: str | None = None,
    ) -> tuple[RunRow, bool]:
        """Record a run as QUEUED.

        Args:
            spec: validated spec; stored as resolved.
            created_by: token id.
            idempotency: the request's key, if it has one.
            create_project: create the run's project if it does not exist.
            owner: who owns that token, or its name; None to look it up.

        Returns:
            The run, and whether it is new: False for a repeated request.

        Raises:
            IdempotencyConflict: the key was used with another body, or for a deleted run.
            QuotaExceeded: the project has its maximum number of waiting runs.
            UnknownProject: the project does not exist and is not to be created.
            OriginGone: the run that it starts from is deleted.
        """
        for _ in range(_CREATE_ATTEMPTS):
            try:
                with self._database.write() as connection:
                    known = known_run(connection, idempotency)
                    if known is not None:
                        note_target(known.id)
                        return known, False
                    hold_origin(connection, spec)
                    join_queue(connection, spec.project, self.clock(), create=create_project)
                    run = self._insert(connection, spec, created_by, owner, idempotency)
                    return run, True
            except IntegrityError:
                # Another replica used the key first, or the id is taken: try again.
                continue
        raise DatabaseError("found no free run id or idempotency key; try again")

    def _insert(
        self,
        connection: Connection,
        spec: RunSpec,
        created_by: str,
        owner: str | None,
        idempotency: IdempotencyKey | None,
    ) -> RunRow:
        now = self.clock()
        if owner is None:
            owner = connection.execute(_OWNER, {"token_id": created_by}).scalar_one_or_none()
        row = new_row(new_id("run", now), spec, created_by, now, owner)
        writer = RunWriter(connection, row, now, self._database.hooks, new=True)
        writer.begin()
        run = writer.save()
        note_target(run.id)
        if run.tags:
            rows = [
                {"run_id": run.id, "key": key, "value": value} for key, value in run.tags.items()
            ]
            connection.execute(insert(run_tags), rows)
        if idempotency is not None:
            remember(connection, idempotency, run.id, now)
        return run

    def knows(self, idempotency: IdempotencyKey | None) -> bool:
        """Return whether the key was used before, for anything; ``create`` decides what that
        means."""
        if idempotency is None:
            return False
        with self._database.read() as connection:
            return used(connection, idempotency) is not None

    def request_stop(self, run_id: str, stop: Stop) -> RunRow:
        """Cancel or pause a run: at once if it is not on the cluster, else through STOPPING until
        its driver has ended.

        Repeating a request changes nothing; a cancel replaces a pause. Raises TransitionConflict.
        """
        with self._database.write() as connection:
            writer = self._locked(connection, run_id)
            run = writer.run
            if run.status == RunStatus.STOPPING and run.stop_requested == stop:
                if run.preempted_by is None:
                    return run
                # A user's pause overrides the scheduler's: the run does not queue again by itself.
                writer.set({"preempted_by": None, "reason_code": None, "reason_message": None})
                return writer.save()
            if run.status == RunStatus.STOPPING and stop == "pause":
                raise TransitionConflict(
                    run_id, run.status, "it is being cancelled and cannot be paused"
                )
            requested: dict[str, Any] = {
                "stop_requested": stop,
                "stop_requested_at": self.clock(),
                "preempted_by": None,
            }
            if run.status in SUBMITTED:
                writer.set(requested)
                writer.append(EventKind.STOP_REQUESTED, self.clock(), {"stop": stop})
                if run.status != RunStatus.STOPPING:
                    writer.change_status(RunStatus.STOPPING, None)
            elif stop == "cancel":
                writer.change_status(RunStatus.CANCELLED, cancelled_by_user())
            else:
                writer.change_status(RunStatus.PAUSED, paused_by_user())
            return writer.save()

    def resume(self, run_id: str) -> RunRow:
        """Queue a paused run again. Raises TransitionConflict if it is not PAUSED."""
        wanted = f"only a paused run can be resumed; fork this one with resume_from.run_id={run_id}"
        return self.transition(run_id, RunStatus.PAUSED, RunStatus.QUEUED, wanted=wanted)

    def set_notes(self, run_id: str, notes: str | None) -> RunRow:
        """Replace the notes of a run. Raises TransitionConflict if it was deleted."""
        with self._database.write() as connection:
            writer = self._locked(connection, run_id)
            writer.set({"notes": notes})
            return writer.save()

    def begin_delete(self, run_id: str) -> None:
        """Let no run start from this one any more, so that its files can be deleted.

        If the service dies meanwhile, the run can only be deleted again. Raises TransitionConflict
        if it has not ended, or another run will start from its checkpoint.
        """
        with self._database.write() as connection:
            writer = self._locked(connection, run_id)
            ended = [status for status in RunStatus if status.terminal]
            _expect(
                writer.run, ended, None, "only a run that has ended can be deleted; cancel it first"
            )
            if run_id in awaited_in(connection):
                raise TransitionConflict(
                    run_id,
                    writer.run.status,
                    "another run will start from its checkpoint; wait until that run trains, or "
                    "cancel it",
                )
            writer.set({"stop_requested": "delete"})
            writer.save()

    def delete(self, run_id: str) -> None:
        """Delete a run that has ended, with its history. Its idempotency key stays used. Raises
        TransitionConflict."""
        ended = [status for status in RunStatus if status.terminal]
        with self._database.write() as connection:
            gone = connection.execute(
                delete(runs).where(runs.c.id == run_id, runs.c.status.in_(ended))
            ).rowcount
            if gone:
                return
            run = find_run(connection, run_id)
        raise TransitionConflict(
            run_id, run.status if run else None, "only a run that has ended can be deleted"
        )
