"""Changes of runs by the reconciler, each guarded by the state that it saw."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import bindparam, update

from everstep.wire import Reason, RunStatus
from everstep.wire.events import EventKind
from service.db.run_queries import RunQueries
from service.db.tables import runs
from service.db.writer import RunWriter
from service.model.run_rows import RunRow
from service.model.states import LIVE, SUBMITTED, TransitionConflict
from service.projections.changes import NO_WORKERS
from service.projections.reasons import preempted

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
        """Change a run's status if it still is what the caller saw.

        Args:
            run_id: the run.
            expected: status, or statuses, in which the change is valid.
            to: new status.
            reason: why; None clears the old reason.
            submission: submission that the caller saw; None does not check.
            at: when it happened (unix seconds); None is now.
            columns: further columns of the row to set.

        Raises:
            TransitionConflict: the run was deleted or changed, or ``to`` may not follow its status.
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
        """Take the next submission number. From now on only it counts; events of older submissions
        are ignored.

        A QUEUED run becomes STARTING with at most ``workers_limit`` ranks; a running one becomes
        RECOVERING with its current limit. Raises TransitionConflict if another submission was
        claimed meanwhile, or the run is stopping, paused or ended.
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
        """Store the Ray job of a submission. Raises TransitionConflict if a newer one was
        claimed."""
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
            _expect(writer.run, SUBMITTED, submission, "its job cannot be recorded")
            writer.set({"ray_job_id": ray_job_id, "submitted_at": self._clock()})
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
            writer = RunWriter.lock(connection, run_id, self._clock())
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
            writer.append(EventKind.STORAGE_ADOPTED, self._clock(), data)
            return writer.save()

    def preempt(self, run_id: str, submission: int, by: str) -> RunRow:
        """Request a pause for run ``by`` of a higher priority. Once paused, the run queues again in
        the same transaction.

        Raises TransitionConflict if it is already stopping, has another submission, or is not on
        the cluster.
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
            writer.change_status(RunStatus.STOPPING, preempted(writer.visible_id(by)))
            return writer.save()

    def shrink(self, run_id: str, submission: int, to: int, by: str) -> RunRow:
        """Limit a run to ``to`` ranks until ``unshrink``, for run ``by`` of a higher priority.

        Raises TransitionConflict if it is stopping, has another submission, or is not on the
        cluster.
        """
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
            _expect(writer.run, SUBMITTED - {RunStatus.STOPPING}, submission, "it cannot be shrunk")
            writer.set({"shrunk": {"to": to, "by": by, "at": self._clock()}})
            writer.append(
                EventKind.WORKERS_LIMITED,
                self._clock(),
                {"limit": to, "by": writer.visible_id(by) or "of another project"},
            )
            return writer.save()

    def unshrink(self, run_id: str, submission: int) -> RunRow:
        """Remove the limit of ``shrink``. Raises TransitionConflict as ``shrink``."""
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
        """Set or clear the reason why a run waits in its status. Does nothing if the status has
        changed."""
        self.set_reasons([(run_id, expected, reason)])

    def set_reasons(self, reasons: Sequence[tuple[str, RunStatus, Reason | None]]) -> None:
        """Set reasons of several runs, as (run id, expected status, reason). They are not part of
        the history."""
        now = self._clock()
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
