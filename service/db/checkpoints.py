"""Checkpoints of all runs: which are kept, when each was last verified, and which other runs will
start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import func, select

from everstep.wire import RunStatus
from service.db.engine import Database
from service.db.planner_hints import Few
from service.db.sweep_tables import UNENDED, sweep_runs, sweeps
from service.db.tables import checkpoint_checks, runs
from service.model.stored_spec import StoredSpec

_ENDED: Final = sorted(status.value for status in RunStatus if status.terminal)
_IS_UNENDED: Final = Few(
    runs.c.status.in_(sorted(status.value for status in RunStatus if not status.terminal))
)


@dataclass(frozen=True)
class KeptCheckpoint:
    """A committed checkpoint that retention has not deleted, according to its run's journal."""

    run_id: str
    name: str
    size_bytes: int
    checked_at: float
    """Unix seconds at which its bytes were last known to be valid: verified, or committed."""
    run_ended: bool


class CheckpointRecords:
    """Checkpoints across runs. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def kept(self) -> list[KeptCheckpoint]:
        """Return every kept checkpoint (at most the newest 64 of a run), the least recently
        verified first."""
        rows = select(runs.c.id, runs.c.status, runs.c.recent_checkpoints).where(
            runs.c.latest_checkpoint.is_not(None)
        )
        with self._database.read() as connection:
            checks = {
                (run_id, name): at
                for run_id, name, at in connection.execute(
                    select(
                        checkpoint_checks.c.run_id,
                        checkpoint_checks.c.name,
                        checkpoint_checks.c.verified_at,
                    )
                )
            }
            found = [
                KeptCheckpoint(
                    run_id=run_id,
                    name=item["name"],
                    size_bytes=item["size_bytes"],
                    checked_at=max(item["committed_at"], checks.get((run_id, item["name"]), 0.0)),
                    run_ended=status in _ENDED,
                )
                for run_id, status, recent in connection.execute(rows)
                for item in recent
            ]
        return sorted(found, key=lambda kept: kept.checked_at)

    def awaited(self) -> dict[str, frozenset[int]]:
        """Return, by run, the steps of checkpoints that other runs will start from: runs that have
        not ended and have no checkpoint of their own, and those that a sweep will submit."""
        rows = select(runs.c.spec).where(_IS_UNENDED, runs.c.latest_checkpoint.is_(None))
        later = select(sweep_runs.c.spec).join(sweeps).where(UNENDED, sweep_runs.c.run_id.is_(None))
        found: dict[str, frozenset[int]] = {}
        with self._database.read() as connection:
            for (spec,) in [*connection.execute(rows), *connection.execute(later)]:
                origin = StoredSpec.read(spec).origin
                if origin is not None:
                    steps = found.get(origin.run_id, frozenset())
                    found[origin.run_id] = steps | {int(origin.step)}
        return found

    def corrupt(self) -> dict[str, frozenset[str]]:
        """Return the names of corrupt checkpoints by run, for runs that have not ended."""
        damaged = select(checkpoint_checks.c.run_id, checkpoint_checks.c.name).where(
            checkpoint_checks.c.problem.is_not(None)
        )
        query = damaged.join_from(checkpoint_checks, runs).where(_IS_UNENDED)
        found: dict[str, frozenset[str]] = {}
        with self._database.read() as connection:
            for run_id, name in connection.execute(query):
                found[run_id] = found.get(run_id, frozenset()) | {name}
        return found

    def unended(self) -> list[str]:
        """Return the ids of runs that have not ended."""
        with self._database.read() as connection:
            return list(connection.execute(select(runs.c.id).where(_IS_UNENDED)).scalars())

    def ended_between(self, begin: float, end: float) -> list[str]:
        """Return the ids of runs that ended after ``begin``, up to ``end``, in unix seconds."""
        query = select(runs.c.id).where(runs.c.finished_at > begin, runs.c.finished_at <= end)
        with self._database.read() as connection:
            return list(connection.execute(query).scalars())

    def count_checks(self) -> tuple[int, int]:
        """Return how many checkpoints were sound and how many corrupt when last verified."""
        query = select(func.count(), func.count(checkpoint_checks.c.problem)).select_from(
            checkpoint_checks
        )
        with self._database.read() as connection:
            total, corrupt = connection.execute(query).one()
        return total - corrupt, corrupt
