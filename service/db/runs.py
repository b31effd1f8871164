"""Runs in the database: made once, changed through RunWriter, found by filters. Every method is one
transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from everstep.spec.run_spec import RunSpec
from everstep.wire import Reason, RunStatus
from everstep.wire.events import EventKind
from service.db.audit import note_target
from service.db.checkpoints import CheckpointRecords
from service.db.engine import Database, DatabaseError, Guard
from service.db.idempotency import IdempotencyKey, is_used, known_run, remember
from service.db.ids import new_run_id
from service.db.new_run import new_row
from service.db.planner_hints import IS_LIVE
from service.db.projects import join_queue
from service.db.run_lookup import EVERY_RUN, Place, RunFilter, counted, find_run, page_query
from service.db.status_changes import STATUS_CHANGES, changes_of
from service.db.storage_identity import StorageRecords
from service.db.tables import run_tags, runs, transitions
from service.db.tokens import CLAIM_HOLDS, Claim
from service.db.writer import RunWriter
from service.model.rows import TransitionRow
from service.model.run_rows import ListedRun, RunHead, RunRow
from service.model.states import LIVE, SUBMITTED, TransitionConflict
from service.projections.changes import NO_WORKERS
from service.projections.reasons import cancelled_by_user, paused_by_user, preempted
from storage.run_control import Stop

_CREATE_ATTEMPTS: Final = 5
_CHUNK_IDS: Final = 500
_ROWS: Final = RunRow.select(runs)
_LISTED_BY_IDS: Final = (
    ListedRun.select(runs)
    .add_columns(STATUS_CHANGES)
    .where(runs.c.id.in_(bindparam("ids", expanding=True)))
)
_HEADS: Final = select(*(runs.c[name] for name in RunHead._fields))
_CLAIMED_HEADS: Final = _HEADS.add_columns(CLAIM_HOLDS)
_STATUS_COUNTS: Final = select(runs.c.status, func.count())
_LIVE: Final = _ROWS.where(IS_LIVE).order_by(runs.c.created_at, runs.c.id)
_LIVE_HEADS: Final = (
    select(runs.c.id, runs.c.row_version).where(IS_LIVE).order_by(runs.c.created_at, runs.c.id)
)
_BY_IDS: Final = _ROWS.where(runs.c.id.in_(bindparam("ids", expanding=True)))
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
_TRANSITIONS: Final = (
    select(*(transitions.c[name] for name in TransitionRow._fields))
    .where(transitions.c.run_id.in_(bindparam("ids", expanding=True)))
    .order_by(transitions.c.run_id, transitions.c.seq)
)


class RunStore:
    """Runs and their states. ``clock`` gives unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self.checkpoints = CheckpointRecords(database)
        self.storage = StorageRecords(database, clock)

    # ---------------------------------------------------------------- made and read

    def create(
        self,
        spec: RunSpec,
        created_by: str,
        idempotency: IdempotencyKey | None = None,
        guard: Guard | None = None,
        *,
        create_project: bool = True,
    ) -> tuple[RunRow, bool]:
        """Record a run as QUEUED.

        Args:
            spec: Validated spec; stored as resolved.
            created_by: Token id.
            idempotency: The request's key, where it has one.
            guard: Called first in the transaction; raises where the run is not to be made after
                all.
            create_project: Make the run's project where it is missing.

        Returns:
            The run, and whether it is new: False for a repeated request.

        Raises:
            IdempotencyConflict: The key belongs to another body, or to a run that is deleted.
            QuotaExceeded: The project has as many waiting runs as it may.
            UnknownProject: It is missing, and is not to be made.
        """
        for _ in range(_CREATE_ATTEMPTS):
            try:
                with self._database.write() as connection:
                    if guard is not None:
                        guard(connection)
                    known = known_run(connection, idempotency)
                    if known is not None:
                        note_target(known.id)
                        return known, False
                    join_queue(connection, spec.project, self._clock(), create=create_project)
                    return self._insert(connection, spec, created_by, idempotency), True
            except IntegrityError:
                # Another replica used the key first, or the id is taken: look again.
                continue
        raise DatabaseError("no free run id or idempotency key was found; try again")

    def _insert(
        self,
        connection: Connection,
        spec: RunSpec,
        created_by: str,
        idempotency: IdempotencyKey | None,
    ) -> RunRow:
        now = self._clock()
        writer = RunWriter(
            connection, new_row(new_run_id(now), spec, created_by, now), now, new=True
        )
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
        """Whether the key was used before, whatever for: ``create`` says what that means."""
        if idempotency is None:
            return False
        with self._database.read() as connection:
            return is_used(connection, idempotency)

    def get(self, run_id: str) -> RunRow | None:
        with self._database.look() as connection:
            return find_run(connection, run_id)

    def find(self, where: RunFilter, limit: int, before: Place | None = None) -> list[RunRow]:
        """Newest first; ``before`` is (created_at, id) of the last run of the page before."""
        with self._database.read() as connection:
            return [
                RunRow.read(row)
                for row in connection.execute(
                    *page_query(connection, _ROWS, where, limit, before)
                ).all()
            ]

    def page(self, where: RunFilter, limit: int, before: Place | None = None) -> list[RunHead]:
        """What ``find`` finds, of which ``listed`` tells more."""
        with self._database.look() as connection:
            return [
                RunHead._make(row)
                for row in connection.execute(
                    *page_query(connection, _HEADS, where, limit, before)
                ).all()
            ]

    def claimed_page(
        self, claim: Claim, where: RunFilter, limit: int, before: Place | None = None
    ) -> list[RunHead] | None:
        """The same for whoever makes this claim, by the same question to the database; None where
        it does not hold any more."""
        with self._database.look() as connection:
            query, values = page_query(connection, _CLAIMED_HEADS, where, limit, before)
            rows = connection.execute(query, values | claim.values(self._clock())).all()
            holds = rows[0][-1] if rows else claim.holds(connection, self._clock())
        return [RunHead._make(row[:-1]) for row in rows] if holds else None

    def listed(self, run_ids: Collection[str]) -> dict[str, tuple[ListedRun, list[TransitionRow]]]:
        """These runs with the changes of their status, oldest first, by id; a run that is gone is
        left out."""
        if not run_ids:
            return {}
        with self._database.look() as connection:
            rows = connection.execute(_LISTED_BY_IDS, {"ids": list(run_ids)}).all()
        found = [(ListedRun.read(row[:-1]), row[-1]) for row in rows]
        return {run.id: (run, changes_of(run.id, changes)) for run, changes in found}

    def live(self) -> list[RunRow]:
        """Every run that the reconciler has work with, oldest first: neither ended nor paused."""
        with self._database.read() as connection:
            return [RunRow.read(row) for row in connection.execute(_LIVE)]

    def live_versions(self) -> dict[str, int]:
        """Version of each of their rows by id, in that order: those that have not changed need not
        be read again."""
        with self._database.look() as connection:
            return {run_id: version for run_id, version in connection.execute(_LIVE_HEADS)}

    def rows(self, run_ids: Sequence[str]) -> dict[str, RunRow]:
        """Return these runs by id, without those that are gone."""
        with self._database.look() as connection:
            found = connection.execute(_BY_IDS, {"ids": list(run_ids)})
            return {run.id: run for run in map(RunRow.read, found)}

    def heads(self) -> dict[str, tuple[str, str]]:
        """(project, status) of every run, by id."""
        query = select(runs.c.id, runs.c.project, runs.c.status)
        with self._database.read() as connection:
            return {
                run_id: (project, status) for run_id, project, status in connection.execute(query)
            }

    def ledgers(self, run_ids: Sequence[str]) -> dict[str, tuple[dict[str, Any], float | None]]:
        """(time ledger, when it ended in unix seconds or None) of each of these runs; a run that is
        gone is left out."""
        found: dict[str, tuple[dict[str, Any], float | None]] = {}
        columns = (runs.c.id, runs.c.time_ledger, runs.c.finished_at)
        with self._database.read() as connection:
            for start in range(0, len(run_ids), _CHUNK_IDS):
                query = select(*columns).where(runs.c.id.in_(run_ids[start : start + _CHUNK_IDS]))
                found |= {
                    run_id: (ledger, finished_at)
                    for run_id, ledger, finished_at in connection.execute(query)
                }
        return found

    def transitions(self, run_ids: Collection[str]) -> dict[str, list[TransitionRow]]:
        """Changes of status of each run, oldest first."""
        found: dict[str, list[TransitionRow]] = {run_id: [] for run_id in run_ids}
        with self._database.look() as connection:
            for row in connection.execute(_TRANSITIONS, {"ids": list(run_ids)}).all():
                found[row[0]].append(TransitionRow._make(row))
        return found

    def count_by_status(self, where: RunFilter = EVERY_RUN) -> dict[RunStatus, int]:
        """How many of these runs, by default of all, are in each status; zero where none is."""
        query, values = counted(_STATUS_COUNTS, where)
        with self._database.read() as connection:
            found = connection.execute(query.group_by(runs.c.status), values).all()
        return dict.fromkeys(RunStatus, 0) | {RunStatus(status): count for status, count in found}

    # ---------------------------------------------------------------- what the reconciler changes

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
    ) -> RunRow:
        """Change a run's status where it still is what the caller saw.

        Args:
            run_id: The run.
            expected: Status, or statuses, in which the change is right.
            to: New status.
            reason: Why; None clears the old reason.
            submission: Submission that the caller saw; None does not check.
            at: When it happened (unix seconds); None is now.
            columns: Further columns of the row to set with it.

        Raises:
            TransitionConflict: The run is gone, elsewhere, or ``to`` may not follow its status.
        """
        allowed = frozenset({expected}) if isinstance(expected, RunStatus) else frozenset(expected)
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
            _expect(writer.run, allowed, submission, f"it cannot become {to}")
            writer.set(columns or {})
            writer.change_status(to, reason, at)
            return writer.save()

    def claim_submission(
        self, run_id: str, expected_submission: int, workers_limit: int | None = None
    ) -> RunRow:
        """Take the next submission number: from now on only it counts, and what older ones still
        write is ignored.

        A QUEUED run becomes STARTING and may use ``workers_limit`` ranks, where that is fewer than
        it asked for; a running one becomes RECOVERING within the limit that it has. Raises
        TransitionConflict where another submission was claimed meanwhile, or the run is stopping,
        paused or ended.
        """
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
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
        """Remember the Ray job of a submission. Raises TransitionConflict where a newer one was
        claimed."""
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
            _expect(writer.run, SUBMITTED, submission, "its job cannot be recorded")
            writer.set({"ray_job_id": ray_job_id, "submitted_at": self._clock()})
            return writer.save()

    def adopt(self, run_id: str, storage_id: str, newest: int, *, is_short: bool) -> RunRow:
        """Bring a run that has not ended in line with an adopted storage, and say so in its
        history.

        Args:
            run_id: The run.
            storage_id: Of the storage.
            newest: Newest submission that has a journal there. Later ones that the database does
                not know count from now on.
            is_short: Whether the storage lacks what the database knows: then that is forgotten.

        Raises TransitionConflict where the run is gone.
        """
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
            before = writer.run.submission
            if writer.run.status.terminal:
                return writer.run
            if newest > before:
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
            writer.append(EventKind.STORAGE_ADOPTED, self._clock(), data)
            return writer.save()

    def preempt(self, run_id: str, submission: int, by: str) -> RunRow:
        """Ask a run to pause for run ``by`` of a higher priority. Once paused it queues again, in
        the same transaction.

        Raises TransitionConflict where it is stopping already, has another submission, or nothing
        of it is on the cluster.
        """
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
            _expect(
                writer.run, SUBMITTED - {RunStatus.STOPPING}, submission, "it cannot be preempted"
            )
            writer.set(
                {"stop_requested": "pause", "stop_requested_at": self._clock(), "preempted_by": by}
            )
            writer.append(EventKind.STOP_REQUESTED, self._clock(), {"stop": "pause"})
            writer.change_status(RunStatus.STOPPING, preempted(writer.told(by)))
            return writer.save()

    def shrink(self, run_id: str, submission: int, to: int, by: str) -> RunRow:
        """Let a run use at most ``to`` ranks until ``unshrink``, for run ``by`` of a higher
        priority.

        Raises TransitionConflict where it is stopping, has another submission, or nothing of it is
        on the cluster.
        """
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
            _expect(writer.run, SUBMITTED - {RunStatus.STOPPING}, submission, "it cannot be shrunk")
            writer.set({"shrunk": {"to": to, "by": by, "at": self._clock()}})
            writer.append(
                EventKind.WORKERS_LIMITED,
                self._clock(),
                {"limit": to, "by": writer.told(by) or "of another project"},
            )
            return writer.save()

    def unshrink(self, run_id: str, submission: int) -> RunRow:
        """Let a run have what it was started with again. Raises TransitionConflict as
        ``shrink``."""
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
            _expect(
                writer.run, SUBMITTED - {RunStatus.STOPPING}, submission, "it cannot grow again"
            )
            if writer.run.shrunk is None:
                return writer.run
            writer.set({"shrunk": None})
            writer.append(
                EventKind.WORKERS_LIMITED,
                self._clock(),
                {"limit": writer.run.workers_limit, "by": None},
            )
            return writer.save()

    def set_reason(self, run_id: str, expected: RunStatus, reason: Reason | None) -> None:
        """Say why a run waits in its status, or clear it; nothing where it is no longer in it."""
        self.set_reasons([(run_id, expected, reason)])

    def set_reasons(self, said: Sequence[tuple[str, RunStatus, Reason | None]]) -> None:
        """The same for several runs, as (run id, expected status, reason). Words alone: nothing of
        it belongs to the history."""
        now = self._clock()
        values = [
            {"run_id": run_id, "expected": expected.value, "now": now}
            | (
                {"code": None, "message": None}
                if reason is None
                else {"code": reason.code.value, "message": reason.message}
            )
            for run_id, expected, reason in said
        ]
        with self._database.write() as connection:
            connection.execute(_SAY, values)

    # ---------------------------------------------------------------- what users ask for

    def request_stop(self, run_id: str, stop: Stop) -> RunRow:
        """Cancel or pause: at once where nothing of the run is on the cluster, else STOPPING until
        the driver has let go.

        Asking again for what is under way changes nothing; a cancel replaces a pause. Raises
        TransitionConflict.
        """
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
            run = writer.run
            if run.status == RunStatus.STOPPING and run.stop_requested == stop:
                if run.preempted_by is None:
                    return run
                # The user's pause outlasts the scheduler's: the run does not come back by itself.
                writer.set({"preempted_by": None, "reason_code": None, "reason_message": None})
                return writer.save()
            if run.status == RunStatus.STOPPING and stop == "pause":
                raise TransitionConflict(
                    run_id, run.status, "it is being cancelled and cannot be paused"
                )
            requested = {
                "stop_requested": stop,
                "stop_requested_at": self._clock(),
                "preempted_by": None,
            }
            if run.status in SUBMITTED:
                writer.set(requested)
                writer.append(EventKind.STOP_REQUESTED, self._clock(), {"stop": stop})
                if run.status != RunStatus.STOPPING:
                    writer.change_status(RunStatus.STOPPING, None)
            elif stop == "cancel":
                writer.change_status(RunStatus.CANCELLED, cancelled_by_user())
            else:
                writer.change_status(RunStatus.PAUSED, paused_by_user())
            return writer.save()

    def resume(self, run_id: str) -> RunRow:
        """Queue a paused run again. Raises TransitionConflict where it is not PAUSED."""
        return self.transition(run_id, RunStatus.PAUSED, RunStatus.QUEUED)

    def delete(self, run_id: str) -> None:
        """Forget a run that has ended, with its history. Its idempotency key stays used. Raises
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


def _expect(
    run: RunRow, allowed: Collection[RunStatus], submission: int | None, wanted: str
) -> None:
    if run.status not in allowed:
        raise TransitionConflict(run.id, run.status, wanted)
    if submission is not None and run.submission != submission:
        raise TransitionConflict(
            run.id, run.status, f"{wanted}: its submission is {run.submission}, not {submission}"
        )
