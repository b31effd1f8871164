"""Holds: who reads a checkpoint says so beside it, and retention leaves it alone until the reader is done or was not heard of."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress

from storage.errors import StorageError, StorageNotFound
from storage.run_dir import CheckpointName, RunDir

HOLD_S = 300.0
"""A hold that was not renewed for so long counts no more: its holder died."""
_RENEW_S = 60.0


class CheckpointHold:
    """One reader's hold on a checkpoint. A storage that takes no hold (full, read-only) is read from without."""

    def __init__(self, run_dir: RunDir, name: str) -> None:
        """Taken at once: what is there after this stays there."""
        self._files = run_dir.files
        self._path = run_dir.holds_path(f"{name}.{secrets.token_hex(6)}")
        self._renewed_at = 0.0
        self.renew()

    def renew(self) -> None:
        """Call it again and again while reading; most calls cost nothing."""
        now = time.time()
        if now - self._renewed_at >= _RENEW_S:
            self._renewed_at = now
            with suppress(StorageError):
                self._files.write(self._path, json.dumps({"until": now + HOLD_S}).encode())

    def release(self) -> None:
        with suppress(StorageError):  # it ends by itself
            self._files.delete_file(self._path)


def held_checkpoints(run_dir: RunDir) -> set[str]:
    """Names of checkpoints that somebody reads; holds that ended are removed. Raises StorageError."""
    found: set[str] = set()
    for entry in run_dir.files.list(run_dir.holds_path()):
        name = entry.name.rpartition(".")[0]
        path = run_dir.holds_path(entry.name)
        if CheckpointName.parse(name) is None:
            continue  # a hold that is just being written
        try:
            until = float(json.loads(run_dir.files.read(path))["until"])
        except StorageNotFound:
            continue  # released since it was listed
        except (ValueError, KeyError, TypeError):
            until = 0.0
        if until > time.time():
            found.add(name)
        else:
            run_dir.files.delete_file(path)
    return found
