"""Ownership of a run: each submission and attempt claims it with a file, and marks older claims as
superseded.

An attempt does both before it looks for a state to resume from. So if an attempt reads its own
claim and it is not marked, that attempt was still the newest at that time, whatever messages it
missed. Even a rank that reaches only the storage can check this. Claims are opened by name, since a
directory listing of a network filesystem may be a minute old.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

from storage.errors import AlreadyClaimed, StorageNotFound
from storage.filesystem import require_exclusive_creates
from storage.run_dir import Origin, RunDir

_GAP = 3
"""Maximum number of consecutive submissions, or attempts, that died before they claimed the run."""


def claim_submission(run_dir: RunDir, submission: int) -> None:
    """Claim a submission's number for this process.

    Raises:
        AlreadyClaimed: another process has claimed it.
        InvalidStorage: the storage does not support exclusive creation.
    """
    path = run_dir.claim_path((submission, 0))
    require_exclusive_creates(run_dir.files, path.rpartition("/")[0])
    if not run_dir.files.create_new(path, _claim()):
        found = _read(run_dir, (submission, 0))
        raise AlreadyClaimed(
            f"submission {submission} of run {run_dir.run_id} was already started by process "
            f"{found.get('pid')} on {found.get('host')}; the run continues with a later submission"
        )


def supersede_submission(run_dir: RunDir, submission: int) -> None:
    """Mark older submissions as superseded by this one: their remaining processes no longer commit
    or delete anything."""
    for older in range(submission - 1, max(0, submission - 1 - _GAP), -1):
        if _supersede(run_dir, (older, 0), submission):
            return


def claim_attempt(run_dir: RunDir, origin: Origin) -> None:
    """Claim an attempt for this process, and mark older attempts of its submission as superseded.

    Raises AlreadyClaimed if a newer attempt has superseded it, or another process has claimed it.
    """
    submission, attempt = origin
    if not run_dir.files.create_new(run_dir.claim_path(origin), _claim()):
        found = _read(run_dir, origin)
        by = (
            f"attempt {found['successor']}"
            if "successor" in found
            else f"process {found.get('pid')} on {found.get('host')}"
        )
        raise AlreadyClaimed(
            f"attempt {attempt} of run {run_dir.run_id} no longer belongs to this process: {by} "
            "has taken over"
        )
    for older in range(attempt - 1, max(0, attempt - 1 - _GAP), -1):
        if _supersede(run_dir, (submission, older), attempt):
            return


def newest_attempt(run_dir: RunDir, submission: int, known: int) -> int:
    """Return the newest attempt of a submission.

    It may have claimed the run and died before it reached the journal, whose newest attempt is
    ``known``.
    """
    while run_dir.files.exists(run_dir.claim_path((submission, known + 1))):
        known += 1
    return known


def successor(run_dir: RunDir, origin: Origin) -> str | None:
    """Return a text that names what has taken over from an attempt; None if it is the newest.
    Raises StorageError."""
    for claim, what in (((origin[0], 0), "submission"), (origin, "attempt")):
        number = _read(run_dir, claim).get("successor")
        if number is not None:
            return (
                f"{what} {number} of run {run_dir.run_id} has taken over from {what} "
                f"{claim[claim[1] > 0]}"
            )
    return None


def _claim() -> bytes:
    """Return the content of this process's claim. It is constant, so claiming twice succeeds
    (``Files.create_new``)."""
    return json.dumps(
        {"writer": process_nonce(), "host": os.uname().nodename, "pid": os.getpid()}
    ).encode()


def _supersede(run_dir: RunDir, claim: Origin, by: int) -> bool:
    """Mark a claim, and return whether it was marked already. A missing claim is created, so that
    nobody can claim it later."""
    found = _read(run_dir, claim)
    if "successor" in found:
        return True
    run_dir.files.write(run_dir.claim_path(claim), json.dumps({**found, "successor": by}).encode())
    return False


def _read(run_dir: RunDir, claim: Origin) -> dict[str, Any]:
    """Return a claim's content; {} if it does not exist or is being written."""
    try:
        found = json.loads(run_dir.files.read(run_dir.claim_path(claim)))
    except (StorageNotFound, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------- process nonce

# A unique name of this process, with which it recognises its own files.

_nonce: str | None = None


def process_nonce() -> str:
    """Return the nonce, constant for the life of this process. A forked child has a different
    one."""
    global _nonce
    if _nonce is None:
        _nonce = secrets.token_hex(8)
    return _nonce


def _forget() -> None:
    global _nonce
    _nonce = None


os.register_at_fork(after_in_child=_forget)
