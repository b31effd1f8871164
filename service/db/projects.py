"""Projects and their quotas. A project is created with its first run or token, or when quotas are
set."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from sqlalchemy import Connection, bindparam, delete, func, select, update

from everstep.wire import RunStatus
from everstep.wire.team import Quotas
from service.db.audit import note_target
from service.db.engine import DatabaseError, Store, insert_missing
from service.db.tables import IS_LIVE, projects, runs, tokens
from service.model.rows import ProjectRow

DEFAULT_PROJECT: Final = "default"
_MAX_QUEUED: Final = select(projects.c.max_queued).where(projects.c.name == bindparam("name"))


class ProjectError(DatabaseError):
    """Base class of this module's errors."""


class QuotaExceeded(ProjectError):
    """The project has reached its quota."""


class ProjectInUse(ProjectError):
    """A project with runs or tokens cannot be deleted."""


class UnknownProject(ProjectError):
    """The project does not exist, and the request does not create it."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        near = difflib.get_close_matches(name, known, 1)
        meant = f", did you mean {near[0]}?" if near else ";"
        super().__init__(
            f"project {name!r} does not exist{meant} create it with `everstep project create "
            f"{name}`, or with this request: --create-project (create_project=true)"
        )
        self.name = name


@dataclass(frozen=True)
class ProjectLoad:
    """What a project's runs use now."""

    workers: int = 0
    """Ranks that are training."""
    running: int = 0
    """Runs that have a job."""
    queued: int = 0


class ProjectStore(Store):
    """Projects and what they use."""

    def put(self, name: str, quotas: Quotas) -> tuple[ProjectRow, bool]:
        """Set all quotas of a project, creating it if needed. Return it, and whether it is new."""
        note_target(name)
        values = quotas.model_dump()
        with self._database.write() as connection:
            is_new = ensure_project(connection, name, self.clock())
            connection.execute(update(projects).where(projects.c.name == name).values(**values))
            query = ProjectRow.select(projects).where(projects.c.name == name)
            return ProjectRow(*connection.execute(query).one()), is_new

    def all(self) -> list[tuple[ProjectRow, ProjectLoad]]:
        """Return every project by name, with its usage."""
        query = ProjectRow.select(projects).order_by(projects.c.name)
        with self._database.read() as connection:
            rows = [ProjectRow(*row) for row in connection.execute(query)]
            usage = _usage(connection)
        return [(row, usage.get(row.name, ProjectLoad())) for row in rows]

    def quotas(self) -> dict[str, Quotas]:
        """Return the quotas of every project that has any, by name."""
        rows = self._rows(ProjectRow, ProjectRow.select(projects))
        found = {row.name: quotas_of(row) for row in rows}
        return {name: quotas for name, quotas in found.items() if quotas != Quotas()}

    def require(self, name: str) -> None:
        """Raise UnknownProject if there is no such project."""
        with self._database.read() as connection:
            known = connection.execute(select(projects.c.name)).scalars().all()
        if name not in known:
            raise UnknownProject(name, known)

    def delete(self, name: str) -> bool:
        """Delete a project with what belongs to it. Return False if it does not exist.
        Raise ProjectInUse if it has runs or valid tokens."""
        with self._database.write() as connection:
            num_runs = connection.execute(
                select(func.count()).select_from(runs).where(runs.c.project == name)
            ).scalar_one()
            valid = (tokens.c.project == name, tokens.c.revoked_at.is_(None))
            num_tokens = connection.execute(
                select(func.count()).select_from(tokens).where(*valid)
            ).scalar_one()
            if num_tokens or num_runs:
                raise ProjectInUse(
                    f"project {name} has {num_runs} runs and {num_tokens} tokens; delete its runs "
                    "and revoke its tokens first"
                )
            for table in chain.from_iterable(hook.of_project for hook in self._database.hooks):
                connection.execute(delete(table).where(table.c.project == name))
            return bool(
                connection.execute(delete(projects).where(projects.c.name == name)).rowcount
            )


def ensure_project(connection: Connection, name: str, now: float, *, create: bool = True) -> bool:
    """Create the project if it does not exist; return whether it is new.

    The project ``default`` is always created, others only if ``create`` is set. Raises
    UnknownProject.
    """
    if (
        connection.execute(select(projects.c.name).where(projects.c.name == name)).one_or_none()
        is not None
    ):
        return False
    if not create and name != DEFAULT_PROJECT:
        raise UnknownProject(name, connection.execute(select(projects.c.name)).scalars().all())
    return insert_missing(connection, projects, {"name": name, "created_at": now})


def join_queue(connection: Connection, name: str, now: float, *, create: bool) -> None:
    """Check that one more run of the project may wait; with ``create``, create a missing project.

    Raises QuotaExceeded if the maximum is reached, UnknownProject.
    """
    found = connection.execute(_MAX_QUEUED, {"name": name}).one_or_none()
    if found is None:
        ensure_project(connection, name, now, create=create)
        return
    most = found[0]
    if most is None:
        return
    # Serialise submissions to the project: two that count at the same time would miss each other.
    connection.execute(select(projects.c.name).where(projects.c.name == name).with_for_update())
    waiting = (
        select(runs.c.id)
        .where(runs.c.status == RunStatus.QUEUED.value, runs.c.project == name)
        .limit(most)
        .subquery()
    )
    if connection.execute(select(func.count()).select_from(waiting)).scalar_one() >= most:
        raise QuotaExceeded(
            f"project {name} has {most} waiting runs, the maximum of its quota max_queued; wait "
            "for one to start, cancel one, or ask an administrator to raise it"
        )


def quotas_of(row: ProjectRow) -> Quotas:
    return Quotas(
        max_workers=row.max_workers, max_running=row.max_running, max_queued=row.max_queued
    )


def _usage(connection: Connection) -> dict[str, ProjectLoad]:
    query = select(runs.c.project, runs.c.status, runs.c.world_size).where(IS_LIVE)
    found: dict[str, dict[str, Any]] = {}
    for project, status, workers in connection.execute(query):
        sums = found.setdefault(project, {"workers": 0, "running": 0, "queued": 0})
        sums["queued" if status == RunStatus.QUEUED else "running"] += 1
        sums["workers"] += workers or 0
    return {project: ProjectLoad(**sums) for project, sums in found.items()}
