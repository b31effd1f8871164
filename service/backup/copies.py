"""Make a backup of a service's database and storage, and restore one.

The database is copied first and the storage afterwards, while the service and its runs continue. So
rows never refer to more than the journals contain, and events beyond the rows are read again after
a restore. Checkpoints are never overwritten: a row can only name one that retention deleted in
between, which the run's journal records as well.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from service.backup.database_copy import BackupError, copy_database, put_database
from service.db.checkpoints import CheckpointRecords
from service.db.engine import Database, checked_url
from service.db.runs import RunStore
from service.process.home import HomeLock
from service.settings import Settings
from service.storage_identity.adoption import adopt_storage
from service.storage_identity.gate import StorageGate
from service.tree_copy import Skipped, copy_tree, sync
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
            _refuse_filled(Path(storage.uri))
            copy_tree(directory / _STORAGE, Path(storage.uri))
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


def _refuse_filled(root: Path) -> None:
    if root.exists() and any(root.iterdir()):
        raise BackupError(
            f"the storage {root} is not empty; move it away first, or use another --storage"
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
