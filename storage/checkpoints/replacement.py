"""Start a checkpoint in place of what an earlier writer left under its name."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress

from storage.checkpoints.manifest import MANIFEST
from storage.checkpoints.writer import (
    BEGUN,
    TRASH,
    CheckpointWriter,
    ObjectCheckpointWriter,
    read_or_empty,
)
from storage.errors import CheckpointExists, StorageError
from storage.run_dir import RunDir
from storage.run_names import CheckpointName


def begin_checkpoint(
    run_dir: RunDir, name: CheckpointName, is_sound: Callable[[], bool]
) -> CheckpointWriter:
    """Remove what an earlier writer left under this name, and start to write.

    Args:
        is_sound: returns whether the checkpoint of this name is committed and verifies; only called
            if there is a manifest.

    Raises:
        CheckpointExists: it does.
        CheckpointReplaced: on an object store, another process has started it.
    """
    files, directory = run_dir.files, run_dir.checkpoints_path(str(name))
    manifest = f"{directory}/{MANIFEST}"
    if not files.can_append:
        writer = ObjectCheckpointWriter(run_dir, name)
        is_there = files.exists(manifest)
        if is_there and is_sound():
            writer.release()
            raise CheckpointExists(str(name))
        writer.clear_leavings(is_corrupt=is_there)
        return writer
    # after this a slow writer cannot commit
    for entry in files.list(run_dir.checkpoints_path()):
        if entry.name.startswith(f"{BEGUN}{name}-"):
            _clear(run_dir, name, run_dir.checkpoints_path(entry.name))
    judged = read_or_empty(files, manifest)
    if judged and is_sound():
        raise CheckpointExists(str(name))
    # Rename before deleting, and check what was renamed: another writer may have committed since.
    aside = _aside(run_dir, name)
    if files.set_aside(directory, aside):
        if read_or_empty(files, f"{aside}/{MANIFEST}") != judged:
            put_back(run_dir, aside, str(name))
            raise CheckpointExists(str(name))
        files.delete_file(f"{aside}/{MANIFEST}")
        files.delete_dir(aside)
    return CheckpointWriter(run_dir, name)


def put_back(run_dir: RunDir, aside: str, name: str) -> bool:
    """Move a committed checkpoint that was set aside back to its place, if that is free.

    Return whether it is a committed checkpoint. If so, do not delete it, even if its place was
    taken meanwhile.
    """
    files = run_dir.files
    if CheckpointName.parse(name) is None or not files.exists(f"{aside}/{MANIFEST}"):
        return False
    directory = run_dir.checkpoints_path(name)
    if files.exists(f"{directory}/{MANIFEST}"):
        return False
    with suppress(StorageError):
        files.set_aside(aside, directory)
    return True


def _clear(run_dir: RunDir, name: CheckpointName, begun: str) -> None:
    """Fence off another writer, and remove what it wrote."""
    aside = _aside(run_dir, name)
    if run_dir.files.set_aside(begun, aside):
        run_dir.files.delete_file(f"{aside}/{MANIFEST}")  # it was about to commit
        run_dir.files.delete_dir(aside)


def _aside(run_dir: RunDir, name: CheckpointName) -> str:
    return run_dir.checkpoints_path(f"{TRASH}{name}-{secrets.token_hex(6)}")
