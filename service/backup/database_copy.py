"""Copy a database to a file and back: SQLite by its online backup, PostgreSQL by pg_dump."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL

from service.tree_copy import sync

_SQLITE_FILE, _POSTGRESQL_FILE = "everstep.db", "everstep.dump"
_PROGRAM_S: Final = 24 * 3600


class BackupError(Exception):
    """A backup cannot be made or restored; the message says why and what to do."""


def copy_database(url: URL, directory: Path) -> str:
    """Copy the database into the directory; return the file's name."""
    if url.get_backend_name() == "sqlite":
        if not url.database or not Path(url.database).is_file():
            raise BackupError(
                f"database {url.database} does not exist; set EVERSTEP_HOME or --database"
            )
        _copy_sqlite(Path(url.database), directory / _SQLITE_FILE)
        return _SQLITE_FILE
    _run_postgresql(
        ["pg_dump", "--format=custom", "--no-owner", f"--file={directory / _POSTGRESQL_FILE}"], url
    )
    return _POSTGRESQL_FILE


def put_database(url: URL, source: Path) -> None:
    if url.get_backend_name() == "sqlite":
        if source.name != _SQLITE_FILE:
            raise BackupError(
                "the backup is of a PostgreSQL database; use --database postgresql+psycopg://…"
            )
        target = Path(str(url.database))
        if target.exists():
            raise BackupError(
                f"{target} already exists; move it away first, with all files whose names start "
                "with its name"
            )
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _copy_sqlite(source, target)
        return
    if source.name != _POSTGRESQL_FILE:
        raise BackupError("the backup is of a SQLite database; omit --database, or use sqlite:///…")
    command = [
        "pg_restore",
        "--no-owner",
        "--exit-on-error",
        "--single-transaction",
        f"--dbname={url.database}",
        str(source),
    ]
    _run_postgresql(command, url)


def _copy_sqlite(source: Path, target: Path) -> None:
    """Copy with SQLite's online backup: a consistent state, even while others write."""
    draft = target.with_name(f".{target.name}.partial")
    draft.unlink(missing_ok=True)
    try:
        reader = sqlite3.connect(f"file:{source}?mode=ro", uri=True)
        writer = sqlite3.connect(draft)
        try:
            reader.backup(writer)
            writer.execute("PRAGMA journal_mode=DELETE")
            [[answer]] = writer.execute("PRAGMA integrity_check").fetchall()
        finally:
            reader.close()
            writer.close()
    except sqlite3.Error as exc:
        raise BackupError(f"{source} cannot be copied: {exc}") from exc
    if answer != "ok":
        raise BackupError(f"{source} is damaged: {answer}")
    draft.chmod(0o600)
    sync(draft)
    draft.rename(target)


def _run_postgresql(command: Sequence[str], url: URL) -> None:
    """Run one of PostgreSQL's own programs. The server's address and password are passed in the
    environment, which process lists do not show."""
    given = {
        "PGHOST": url.host,
        "PGPORT": url.port,
        "PGUSER": url.username,
        "PGPASSWORD": url.password,
        "PGDATABASE": url.database,
    }
    environ = {
        **os.environ,
        **{name: str(value) for name, value in given.items() if value is not None},
    }
    try:
        ended = subprocess.run(
            list(command),
            env=environ,
            capture_output=True,
            text=True,
            timeout=_PROGRAM_S,
            check=False,
        )
    except FileNotFoundError as exc:
        raise BackupError(
            f"{command[0]} is not installed here; install PostgreSQL's client programs"
        ) from exc
    if ended.returncode != 0:
        raise BackupError(
            f"{command[0]} failed with exit code {ended.returncode}: {ended.stderr.strip()[-500:]}"
        )
