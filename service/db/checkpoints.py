"""Checkpoints of all runs: which are kept, when each was last verified, and which other runs will
start from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, func, select

from everstep.spec.run_spec import RunSpec
from everstep.wire import RunStatus
from service.db.engine import StateConflict, Store, insert_missing
from service.db.projects import QuotaExceeded, ensure_project
from service.db.tables import IS_UNENDED, checkpoint_checks, code_archives, projects, runs
from service.model.run_rows import StoredSpec

_ENDED: Final = sorted(status.value for status in RunStatus if status.terminal)


@dataclass(frozen=True)
class KeptCheckpoint:
    """A committed checkpoint that retention has not deleted, according to its run's journal."""

    run_id: str
    name: str
    size_bytes: int
    checked_at: float
    """Unix seconds at which its bytes were last known to be valid: verified, or committed."""
    run_ended: bool


def awaited_in(connection: Connection) -> dict[str, frozenset[int]]:
    """Return what ``CheckpointRecords.awaited`` returns, in this transaction."""
    rows = select(runs.c.spec).where(IS_UNENDED, runs.c.latest_checkpoint.is_(None))
    found: dict[str, frozenset[int]] = {}
    for (spec,) in connection.execute(rows):
        origin = StoredSpec.read(spec).origin
        if origin is not None:
            steps = found.get(origin.run_id, frozenset())
            found[origin.run_id] = steps | {int(origin.step)}
    return found


class OriginGone(StateConflict):
    """The run whose checkpoint a new one starts from was deleted, or is being deleted."""


def hold_origin(connection: Connection, spec: RunSpec) -> None:
    """Keep the run that ``spec`` starts from as it is until this transaction ends: deleting it
    then finds the new run. Raises OriginGone."""
    if spec.origin is None:
        return
    parent = spec.origin.run_id
    query = select(runs.c.stop_requested).where(runs.c.id == parent).with_for_update(read=True)
    found = connection.execute(query).one_or_none()
    if found is None or found.stop_requested == "delete":
        state = "was" if found is None else "is being"
        raise OriginGone(f"run {parent} {state} deleted; start from another run, or from none")


class CheckpointRecords(Store):
    """Checkpoints across runs. Every method is one transaction."""

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
        not ended and have no checkpoint of their own."""
        with self._database.read() as connection:
            return awaited_in(connection)

    def corrupt(self) -> dict[str, frozenset[str]]:
        """Return the names of corrupt checkpoints by run, for runs that have not ended."""
        damaged = select(checkpoint_checks.c.run_id, checkpoint_checks.c.name).where(
            checkpoint_checks.c.problem.is_not(None)
        )
        query = damaged.join_from(checkpoint_checks, runs).where(IS_UNENDED)
        found: dict[str, frozenset[str]] = {}
        with self._database.read() as connection:
            for run_id, name in connection.execute(query):
                found[run_id] = found.get(run_id, frozenset()) | {name}
        return found

    def unended(self) -> list[str]:
        """Return the ids of runs that have not ended."""
        with self._database.read() as connection:
            return list(connection.execute(select(runs.c.id).where(IS_UNENDED)).scalars())

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


# ---------------------------------------------------------------- code archives

# Which project uploaded which code. Archives belong to projects, although storage keeps equal ones
# once.

_COLUMNS: Final = code_archives.c


class CodeArchives(Store):
    """Uploads by project."""

    def holds(self, project: str, digest: str) -> bool:
        """Return whether a project has uploaded an archive."""
        with self._database.read() as connection:
            return _holds(connection, project, digest)

    def share(self, project: str, digest: str, token_id: str) -> None:
        """Let a project use an archive that another one uploaded. It does not count towards the
        project's limit."""
        if not self.holds(project, digest):
            with self._database.write() as connection:
                self._insert(connection, project, digest, 0, token_id)

    def record(
        self,
        project: str,
        digest: str,
        size_bytes: int,
        token_id: str,
        most_bytes: int,
        *,
        create_project: bool = False,
    ) -> None:
        """Record a project's upload; does nothing if it is already recorded.

        Args:
            project: owner of the archive.
            digest: digest of its bytes.
            size_bytes: number of its bytes.
            token_id: token that uploads it.
            most_bytes: maximum bytes of all archives of a project; 0 is no limit.
            create_project: create the project if it does not exist.

        Raises QuotaExceeded, UnknownProject.
        """
        with self._database.write() as connection:
            ensure_project(connection, project, self.clock(), create=create_project)
            # Serialise the uploads of a project, so that together they respect the limit.
            connection.execute(
                select(projects.c.name).where(projects.c.name == project).with_for_update()
            )
            if _holds(connection, project, digest):
                return
            total = select(func.coalesce(func.sum(_COLUMNS.size_bytes), 0)).where(
                _COLUMNS.project == project
            )
            used = int(connection.execute(total).scalar_one())
            if most_bytes and used + size_bytes > most_bytes:
                raise QuotaExceeded(
                    f"project {project} has {used} bytes of uploaded code; {size_bytes} more would "
                    f"exceed its limit of {most_bytes}. Leave out data and weights "
                    "(.everstepignore), or raise EVERSTEP_MAX_CODE_BYTES"
                )
            self._insert(connection, project, digest, size_bytes, token_id)

    def _insert(
        self, connection: Connection, project: str, digest: str, size_bytes: int, token_id: str
    ) -> None:
        row = {"project": project, "digest": digest, "size_bytes": size_bytes}
        maker = {"created_by": token_id, "created_at": self.clock()}
        insert_missing(connection, code_archives, row | maker)


def _holds(connection: Connection, project: str, digest: str) -> bool:
    wanted = select(_COLUMNS.digest).where(_COLUMNS.project == project, _COLUMNS.digest == digest)
    return connection.execute(wanted).one_or_none() is not None
