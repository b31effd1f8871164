"""Make a backup of a service's database and storage, and restore one.

The database is copied first and the storage afterwards, while the service and its runs continue. So
rows never refer to more than the journals contain, and events beyond the rows are read again after
a restore. Checkpoints are never overwritten: a row can only name one that retention deleted in
between, which the run's journal records as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from sqlalchemy.engine import URL

from service.annexes.backup.tree_copy import Skipped, copy_tree, sync
from service.db.checkpoints import CheckpointRecords
from service.db.engine import Database, checked_url
from service.db.runs import RunStore
from service.settings import HomeLock, Settings
from service.storage_identity import StorageGate, adopt_storage
from storage.filesystem import Storage, open_storage

MANIFEST: Final = "backup.json"
FORMAT: Final = 1
_STORAGE = "storage"


@dataclass(frozen=True)
class Summary:
    """What a backup contains."""

    directory: Path
    num_runs: int
    num_checkpoints: int
    missing: tuple[str, ...]
    """Checkpoints in the database that the storage lacks, as ``RUN_ID/NAME``."""
    size_bytes: int
    num_skipped: int = 0
    """Number of links, FIFOs and other special files in the storage, which are never copied."""
    skipped: tuple[str, ...] = ()
    """The first of them, each with the reason."""


def create(
    settings: Settings, directory: Path, *, with_storage: bool = True, follow: Collection[str] = ()
) -> Summary:
    """Copy database and storage of a service, which may be running, to a new directory.

    The directory appears under its name once the backup is complete. ``follow``: as for
    ``copy_tree``.

    Raises BackupError, LinkedRoot, StorageError, DatabaseError.
    """
    if directory.exists():
        raise BackupError(
            f"{directory} already exists; backups are never overwritten. Choose a new directory"
        )
    storage = open_storage(settings.storage_uri)
    if with_storage and not storage.is_local:
        raise BackupError(
            f"the storage {storage.uri} is an object store: enable versioning or replication of "
            "its bucket, and back up the database with --database-only"
        )
    url = checked_url(settings.database_url)
    draft = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700, parents=True)
    name = copy_database(url, draft)
    skipped = Skipped()
    if with_storage:
        skipped = copy_tree(Path(storage.uri), draft / _STORAGE, follow)
    manifest = {
        "format": FORMAT,
        "everstep": version("everstep"),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "database": name,
        "database_sha256": _sha256(draft / name),
        "storage": storage.uri,
        "with_storage": with_storage,
    }
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for path in (draft / name, draft / MANIFEST, draft):
        sync(path)
    draft.rename(directory)
    return replace(
        _summary(settings, storage, directory),
        num_skipped=skipped.num,
        skipped=tuple(skipped.first),
    )


def restore(settings: Settings, directory: Path) -> Summary:
    """Restore a backup to the database and storage in ``settings``. Both must be empty, and no
    service may be running there.

    Raises BackupError, HomeError, StorageError, DatabaseError.
    """
    manifest = _manifest(directory)
    source = directory / str(manifest["database"])
    if _sha256(source) != manifest["database_sha256"]:
        raise BackupError(f"{source} is damaged: its digest does not match. Use another backup")
    storage, url = open_storage(settings.storage_uri), checked_url(settings.database_url)
    with HomeLock(settings):
        if manifest["with_storage"]:
            if not storage.is_local:
                raise BackupError(
                    f"the backup contains a storage directory, but {storage.uri} is an object "
                    "store; restore to a directory with --storage"
                )
            root = Path(storage.uri)
            if root.exists() and any(root.iterdir()):
                raise BackupError(
                    f"the storage {root} is not empty; move it away first, or use another --storage"
                )
            copy_tree(directory / _STORAGE, root)
        put_database(url, source)
        database = Database(settings.database_url)
        try:
            database.migrate()  # for a backup from an older Everstep
            if manifest["with_storage"]:
                # The database was copied first: the storage's copy may contain submissions that
                # were started in between.
                runs = RunStore(database)
                adopt_storage(storage, runs, StorageGate(storage, runs.storage))
        finally:
            database.close()
    return _summary(settings, storage, directory)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise BackupError(f"{path} cannot be read: {exc.strerror}") from exc


def _manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError) as exc:
        raise BackupError(
            f"{directory} is not a backup: {MANIFEST} is missing or unreadable"
        ) from exc
    if manifest.get("format") != FORMAT:
        raise BackupError(
            f"{directory} has format {manifest.get('format')}, but this Everstep reads {FORMAT}; "
            "use the version that made it"
        )
    return manifest


def _summary(settings: Settings, storage: Storage, directory: Path) -> Summary:
    """Return the summary: compare the checkpoints in the database with those in the storage."""
    database = Database(settings.database_url)
    try:
        kept = CheckpointRecords(database).kept()
        num_runs = sum(RunStore(database).count_by_status().values())
    finally:
        database.close()
    copied = open_storage(str(directory / _STORAGE)) if (directory / _STORAGE).is_dir() else storage
    paths = [
        (f"{each.run_id}/{each.name}", f"runs/{each.run_id}/checkpoints/{each.name}/manifest.json")
        for each in kept
    ]
    missing = tuple(name for name, path in paths if not copied.files.exists(path))
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return Summary(directory, num_runs, len(kept), missing, size)


# ---------------------------------------------------------------- database copy

# Copy a database to a file and back: SQLite by its online backup, PostgreSQL by pg_dump.

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
