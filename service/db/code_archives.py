"""Which project uploaded which code: an archive is a project's own, though storage keeps equal ones
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
    """Uploads by project. ``clock`` gives unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def holds(self, project: str, digest: str) -> bool:
        """Whether a project has uploaded an archive."""
        with self._database.look() as connection:
            return _holds(connection, project, digest)

    def share(self, project: str, digest: str, token_id: str) -> None:
        """Let a project use an archive that another one has uploaded; it counts as nothing of what
        the project may have."""
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
        """Remember that a project uploads an archive; harmless where it did before.

        Args:
            project: Whose the archive is.
            digest: Of its bytes.
            size_bytes: How many they are.
            token_id: Who uploads it.
            most_bytes: Bytes of all archives that a project may have; 0 is no limit.
            create_project: Make the project where it is missing.

        Raises QuotaExceeded, UnknownProject.
        """
        with self._database.write() as connection:
            ensure_project(connection, project, self._clock(), create=create_project)
            # Uploads of one project wait for each other here, so that together they keep to the
            # limit.
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
                    f"project {project} has {used} bytes of uploaded code; {size_bytes} more are "
                    f"beyond the {most_bytes} that it "
                    "may have. Leave data and weights out of it (.everstepignore), or raise "
                    "EVERSTEP_MAX_CODE_BYTES"
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
