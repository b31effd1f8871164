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
    """A copy cannot be made or taken back; the message says why and the way out."""


def copy_database(url: URL, directory: Path) -> str:
    """The file's name."""
    if url.get_backend_name() == "sqlite":
        if not url.database or not Path(url.database).is_file():
            raise BackupError(
                f"there is no database {url.database}; EVERSTEP_HOME or --database names it"
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
                "the copy is of a PostgreSQL database; give --database postgresql+psycopg://…"
            )
        target = Path(str(url.database))
        if target.exists():
            raise BackupError(
                f"{target} exists; move it away first, with everything beside it that begins with "
                "its name"
            )
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _copy_sqlite(source, target)
        return
    if source.name != _POSTGRESQL_FILE:
        raise BackupError(
            "the copy is of a SQLite database; leave --database away, or give sqlite:///…"
        )
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
    """By SQLite's online backup: a state of one moment, whoever writes meanwhile."""
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
    """One of PostgreSQL's own programs. It learns of the server by its environment, which no list
    of processes shows."""
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
            f"{command[0]} ended with {ended.returncode}: {ended.stderr.strip()[-500:]}"
        )
