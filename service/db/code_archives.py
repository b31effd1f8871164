"""Which project uploaded which code. Archives belong to projects, although storage keeps equal ones
once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, func, select

from service.db.conflicts import insert_missing
from service.db.engine import Database
from service.db.projects import QuotaExceeded, ensure_project
from service.db.tables import code_archives, projects

_COLUMNS: Final = code_archives.c


class CodeArchives:
    """Uploads by project. ``clock`` returns unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def holds(self, project: str, digest: str) -> bool:
        """Return whether a project has uploaded an archive."""
        with self._database.autocommit() as connection:
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
            ensure_project(connection, project, self._clock(), create=create_project)
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
        maker = {"created_by": token_id, "created_at": self._clock()}
        insert_missing(connection, code_archives, row | maker)


def _holds(connection: Connection, project: str, digest: str) -> bool:
    wanted = select(_COLUMNS.digest).where(_COLUMNS.project == project, _COLUMNS.digest == digest)
    return connection.execute(wanted).one_or_none() is not None
