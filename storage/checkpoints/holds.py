"""Holds: renewable leases that keep retention from deleting a checkpoint while it is read."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress

from everstep.spec import plain_text
from storage.errors import CorruptFile, StorageError, StorageNotFound
from storage.run_dir import RunDir
from storage.run_names import CheckpointName

HOLD_S = 300.0
"""A hold that was not renewed for this long has expired: its holder died."""
_RENEW_S = 60.0
_MAX_BYTES = 4096

SeenHolds = dict[str, tuple[bytes, float]]
"""By file name: content of a hold, and since when, by this process's monotonic clock."""


class CheckpointHold:
    """A reader's hold on a checkpoint. If the storage cannot store it (full, read-only), reading
    continues without."""

    def __init__(self, run_dir: RunDir, name: str) -> None:
        """Take the hold at once: a checkpoint that exists afterwards stays."""
        self._files = run_dir.files
        self._path = run_dir.holds_path(f"{name}.{secrets.token_hex(6)}")
        self._renewed_at = float("-inf")
        self._num_renewals = 0
        self.renew()

    def renew(self) -> None:
        """Renew the hold if due. Call it often while reading; most calls do nothing."""
        now = time.monotonic()
        if now - self._renewed_at >= _RENEW_S:
            self._renewed_at = now
            self._num_renewals += 1
            # Ranks of older versions compare "until" with their own clock.
            content = {"until": time.time() + HOLD_S, "renewals": self._num_renewals}
            with suppress(StorageError):
                self._files.write(self._path, json.dumps(content).encode())

    def release(self) -> None:
        with suppress(StorageError):  # it expires by itself
            self._files.delete_file(self._path)


def held_checkpoints(run_dir: RunDir, seen: SeenHolds) -> set[str]:
    """Return the names of checkpoints with a hold, and delete expired holds. Raises StorageError.

    A hold expires when its file has not changed for HOLD_S by this process's monotonic clock.
    Reader and deleter are on different hosts, whose clocks may differ by more than that.

    Args:
        seen: state of the caller's earlier calls; updated here.
    """
    found: set[str] = set()
    before, now = dict(seen), time.monotonic()
    seen.clear()
    for entry in run_dir.files.list(run_dir.holds_path()):
        name = entry.name.rpartition(".")[0]
        path = run_dir.holds_path(entry.name)
        if CheckpointName.parse(name) is None:
            continue  # a hold that is being written
        try:
            content = run_dir.files.read(path, _MAX_BYTES)
        except StorageNotFound:
            continue  # released since it was listed
        except CorruptFile:
            content = b""  # a FIFO or the like
        known, since = before.get(entry.name, (content, now))
        if known != content:
            since = now
        if _is_hold(content) and now - since < HOLD_S:
            found.add(name)
            seen[entry.name] = content, since
        else:
            run_dir.files.delete_file(path)
    return found


def _is_hold(content: bytes) -> bool:
    try:
        float(plain_text.parse_json(content)["until"])
    except (ValueError, KeyError, TypeError):
        return False
    return True
