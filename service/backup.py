"""``python -m service.backup create|restore DIRECTORY``: one directory that holds a service's
database and storage.

The database is copied first and the storage afterwards, while the service runs and runs train: rows
then never speak of more than the journals hold, and what the journals hold beyond the rows is read
again after a restore. Checkpoints are never overwritten, so that a row may only name one that
retention took away in between, which its run's journal tells, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from sqlalchemy.engine import URL

from everstep.options.model import SettingsError
from everstep.options.serve import FLAGS
from everstep.spec.plain_text import printable, printable_lines
from service.db.checkpoints import CheckpointRecords
from service.db.engine import Database, DatabaseError, checked_url
from service.db.runs import RunStore
from service.process.home import HomeError, HomeLock
from service.settings import Settings
from service.storage_identity.adoption import adopt_storage
from service.storage_identity.gate import StorageGate
from service.tree_copy import LinkedRoot, Skipped, copy_tree, sync
from storage.errors import StorageError
from storage.filesystem import Storage, open_storage

MANIFEST: Final = "backup.json"
FORMAT: Final = 1
_SQLITE_FILE, _POSTGRESQL_FILE, _STORAGE = "everstep.db", "everstep.dump", "storage"
_PROGRAM_S: Final = 24 * 3600


class BackupError(Exception):
    """A copy cannot be made or taken back; the message says why and the way out."""


@dataclass(frozen=True)
class Summary:
    """What a copy holds."""

    directory: Path
    num_runs: int
    num_checkpoints: int
    missing: tuple[str, ...]
    """Checkpoints that the database names and the storage lacks, as ``RUN_ID/NAME``."""
    size_bytes: int
    num_skipped: int = 0
    """Links, FIFOs and the like in the storage, which are never copied."""
    skipped: tuple[str, ...] = ()
    """The first of them, each with the reason."""


def create(
    settings: Settings, directory: Path, *, with_storage: bool = True, follow: Collection[str] = ()
) -> Summary:
    """Copy database and storage of a service, which may run meanwhile, to a new directory.

    The directory appears under its name once the copy is whole. ``follow``: as for ``copy_tree``.

    Raises BackupError, LinkedRoot, StorageError, DatabaseError.
    """
    if directory.exists():
        raise BackupError(f"{directory} exists; a copy is never changed: name a new directory")
    storage = open_storage(settings.storage_uri)
    if with_storage and not storage.is_local:
        raise BackupError(
            f"the storage {storage.uri} is an object store: turn on its bucket's versioning or "
            "replication, and copy the database "
            "with --database-only"
        )
    url = checked_url(settings.database_url)
    draft = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700, parents=True)
    name = _copy_database(url, draft)
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
    """Put a copy where ``settings`` say that database and storage lie; both must be empty, and no
    service may run there.

    Raises BackupError, HomeError, StorageError, DatabaseError.
    """
    manifest = _manifest(directory)
    source = directory / str(manifest["database"])
    if _sha256(source) != manifest["database_sha256"]:
        raise BackupError(f"{source} holds other bytes than were written: take another copy")
    storage, url = open_storage(settings.storage_uri), checked_url(settings.database_url)
    with HomeLock(settings):
        if manifest["with_storage"]:
            if not storage.is_local:
                raise BackupError(
                    f"the copy's storage is a directory, and {storage.uri} is not; upload it, "
                    "then restore with its URI"
                )
            _refuse_filled(Path(storage.uri))
            copy_tree(directory / _STORAGE, Path(storage.uri))
        _put_database(url, source)
        database = Database(settings.database_url)
        try:
            database.migrate()  # a copy that an older Everstep made
            if manifest["with_storage"]:
                # The database was copied first: the storage's copy may hold submissions that were
                # begun in between.
                runs = RunStore(database)
                adopt_storage(storage, runs, StorageGate(storage, runs.storage))
        finally:
            database.close()
    return _summary(settings, storage, directory)


def _copy_database(url: URL, directory: Path) -> str:
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


def _put_database(url: URL, source: Path) -> None:
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


def _refuse_filled(root: Path) -> None:
    if root.exists() and any(root.iterdir()):
        raise BackupError(
            f"the storage {root} is not empty; move it away first, or give another --storage"
        )


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
        raise BackupError(f"{directory} is no copy: {MANIFEST} is missing or unreadable") from exc
    if manifest.get("format") != FORMAT:
        raise BackupError(
            f"{directory} has format {manifest.get('format')}, and this Everstep reads {FORMAT}; "
            "use the one that made it"
        )
    return manifest


def _summary(settings: Settings, storage: Storage, directory: Path) -> Summary:
    """Held against each other: the checkpoints that the rows name, and those that are whole."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 not."""
    parser = argparse.ArgumentParser(
        prog="everstep backup|restore",
        description="Copy a service's database and storage, and put them back.",
    )
    parser.add_argument("what", choices=("create", "restore"))
    parser.add_argument("directory", type=Path)
    for name in ("database_url", "storage_uri"):
        parser.add_argument(FLAGS[name].flag, dest=name, metavar=FLAGS[name].metavar)
    parser.add_argument(
        "--database-only", action="store_true", help="create: leave the storage out"
    )
    parser.add_argument(
        "--follow",
        action="append",
        default=[],
        metavar="NAME",
        help="create: a directory of the storage that is your own link",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of words")
    given = parser.parse_args(argv)
    try:
        flags = {
            name: value
            for name in ("database_url", "storage_uri")
            if (value := getattr(given, name)) is not None
        }
        settings = Settings.read(os.environ, flags, only=("home", "database_url", "storage_uri"))
        directory = given.directory.absolute()
        if given.what == "create":
            done = create(
                settings, directory, with_storage=not given.database_only, follow=given.follow
            )
        else:
            done = restore(settings, directory)
    except (
        BackupError,
        LinkedRoot,
        SettingsError,
        HomeError,
        StorageError,
        DatabaseError,
        OSError,
    ) as exc:
        words = f"everstep {'backup' if given.what == 'create' else 'restore'}: {exc}"
        print(
            json.dumps({"error": {"message": str(exc)}}) if given.json else printable_lines(words),
            file=sys.stderr,
        )
        return 1
    if given.json:
        print(json.dumps({**asdict(done), "directory": str(done.directory)}))
        return 0
    print(
        f"{done.directory}: {done.num_runs} runs, {done.num_checkpoints} checkpoints, "
        f"{done.size_bytes / 1e6:.1f} MB"
    )
    for name in done.missing:
        print(f"  not there: {printable(name)}, which retention took away meanwhile")
    if done.num_skipped:
        print(f"  left out: {done.num_skipped} links, FIFOs and the like, which no run needs:")
    for words in done.skipped:
        print(f"    {printable(words)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
