"""Runs in the database: created, stopped, resumed and deleted at users' requests. Every method is
one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, bindparam, delete, func, insert, select
from sqlalchemy.exc import IntegrityError

from everstep.spec.run_spec import RunSpec
from everstep.wire import Reason, RunStatus
from everstep.wire.events import EventKind
from service.db.audit import note_target
from service.db.checkpoints import CheckpointRecords
from service.db.engine import Database, Guard
from service.db.errors import DatabaseError
from service.db.idempotency import IdempotencyKey, is_used, known_run, remember
from service.db.ids import new_run_id
from service.db.new_run import new_row
from service.db.projects import join_queue
from service.db.run_changes import RunChanges
from service.db.run_lookup import find_run
from service.db.storage_identity import StorageRecords
from service.db.sweep_places import SweepPlace, check_place, fill_place
from service.db.tables import run_tags, runs, tokens
from service.db.writer import RunWriter
from service.model.run_rows import RunRow
from service.model.states import SUBMITTED, TransitionConflict
from service.projections.reasons import cancelled_by_user, paused_by_user
from storage.run_control import Stop

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
        guard: Guard | None = None,
        *,
        create_project: bool = True,
        place: SweepPlace | None = None,
        owner: str | None = None,
    ) -> tuple[RunRow, bool]:
        """Record a run as QUEUED.

        Args:
            spec: validated spec; stored as resolved.
            created_by: token id.
            idempotency: the request's key, if it has one.
            guard: called first in the transaction; raises to refuse the run.
            create_project: create the run's project if it does not exist.
            place: place of the run in a sweep.
            owner: who owns that token, or its name; None to look it up.

        Returns:
            The run, and whether it is new: False for a repeated request.

        Raises:
            IdempotencyConflict: the key was used with another body, or for a deleted run.
            QuotaExceeded: the project has its maximum number of waiting runs.
            UnknownProject: the project does not exist and is not to be created.
            PlaceTaken: the place has a run, or its sweep does not run any more.
        """
        for _ in range(_CREATE_ATTEMPTS):
            try:
                with self._database.write() as connection:
                    if guard is not None:
                        guard(connection)
                    if place is not None:
                        check_place(connection, place)
                    known = known_run(connection, idempotency)
                    if known is not None:
                        note_target(known.id)
                        return known, False
                    join_queue(connection, spec.project, self._clock(), create=create_project)
                    run = self._insert(connection, spec, created_by, owner, idempotency, place)
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
        place: SweepPlace | None,
    ) -> RunRow:
        now = self._clock()
        sweep_id = None if place is None else place.sweep_id
        if owner is None:
            owner = connection.execute(_OWNER, {"token_id": created_by}).scalar_one_or_none()
        row = new_row(new_run_id(now), spec, created_by, now, sweep_id, owner)
        writer = RunWriter(connection, row, now, new=True)
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
        if place is not None:
            fill_place(connection, place, run.id)
        return run

    def knows(self, idempotency: IdempotencyKey | None) -> bool:
        """Return whether the key was used before, for anything; ``create`` decides what that
        means."""
        if idempotency is None:
            return False
        with self._database.read() as connection:
            return is_used(connection, idempotency)

    def request_stop(self, run_id: str, stop: Stop, reason: Reason | None = None) -> RunRow:
        """Cancel or pause a run: at once if it is not on the cluster, else through STOPPING until
        its driver has ended. ``reason`` None is a user's request.

        Repeating a request changes nothing; a cancel replaces a pause. Raises TransitionConflict.
        """
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
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
            requested = {
                "stop_requested": stop,
                "stop_requested_at": self._clock(),
                "preempted_by": None,
            }
            if run.status in SUBMITTED:
                writer.set(requested | _columns_of(reason))
                writer.append(EventKind.STOP_REQUESTED, self._clock(), {"stop": stop})
                if run.status != RunStatus.STOPPING:
                    writer.change_status(RunStatus.STOPPING, reason)
            elif stop == "cancel":
                writer.change_status(RunStatus.CANCELLED, reason or cancelled_by_user())
            else:
                writer.change_status(RunStatus.PAUSED, reason or paused_by_user())
            return writer.save()

    def resume(self, run_id: str) -> RunRow:
        """Queue a paused run again. Raises TransitionConflict if it is not PAUSED."""
        return self.transition(run_id, RunStatus.PAUSED, RunStatus.QUEUED)

    def set_notes(self, run_id: str, notes: str | None) -> RunRow:
        """Replace the notes of a run. Raises TransitionConflict if it was deleted."""
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run_id, self._clock())
            writer.set({"notes": notes})
            return writer.save()

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


def _columns_of(reason: Reason | None) -> dict[str, str]:
    return {} if reason is None else {"reason_code": reason.code, "reason_message": reason.message}
