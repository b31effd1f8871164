"""Who owns a run: every submission and every attempt claims it by a file of its own, and marks
older claims as succeeded.

An attempt does both before it looks for a state to go on from. So an attempt whose own claim is not
marked was still the newest when it read the claim, whatever messages it missed: even a rank that
reaches nothing but the storage knows. The claim is opened by name, since a listing of a network
filesystem may be a minute old.
"""

from __future__ import annotations

import json
import os
from typing import Any

from storage.errors import AlreadyClaimed, StorageNotFound
from storage.filesystem import require_exclusive_creates
from storage.process_nonce import process_nonce
from storage.run_dir import RunDir
from storage.run_names import Origin

_GAP = 3
"""How many submissions, or attempts, in a row may have died before they claimed anything."""


def claim_submission(run_dir: RunDir, submission: int) -> None:
    """Claim a submission's number for this process.

    Raises:
        AlreadyClaimed: another process has it.
        InvalidStorage: the storage does not refuse to create a file twice.
    """
    path = run_dir.claim_path((submission, 0))
    require_exclusive_creates(run_dir.files, path.rpartition("/")[0])
    if not run_dir.files.create_new(path, _claim()):
        found = _read(run_dir, (submission, 0))
        raise AlreadyClaimed(
            f"submission {submission} of run {run_dir.run_id} was begun before, by process "
            f"{found.get('pid')} on "
            f"{found.get('host')}; the run goes on with a submission of a higher number"
        )


def succeed_submission(run_dir: RunDir, submission: int) -> None:
    """Mark older submissions as succeeded by this one: their remaining processes commit and delete
    nothing any more."""
    for older in range(submission - 1, max(0, submission - 1 - _GAP), -1):
        if _is_succeeded(run_dir, (older, 0), submission):
            return


def claim_attempt(run_dir: RunDir, origin: Origin) -> None:
    """Claim an attempt for this process, and mark the older ones of its submission as succeeded.

    Raises AlreadyClaimed if a newer attempt has succeeded it, or another process has claimed it.
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
            f"attempt {attempt} of run {run_dir.run_id} is not this process's any more: {by} has "
            "taken over"
        )
    for older in range(attempt - 1, max(0, attempt - 1 - _GAP), -1):
        if _is_succeeded(run_dir, (submission, older), attempt):
            return


def newest_attempt(run_dir: RunDir, submission: int, known: int) -> int:
    """Return the newest attempt of a submission. It may have claimed the run and died before the
    journal knew: ``known`` is the newest in the journal."""
    while run_dir.files.exists(run_dir.claim_path((submission, known + 1))):
        known += 1
    return known


def successor(run_dir: RunDir, origin: Origin) -> str | None:
    """Return what has taken over from an attempt, as text for people; None while it is the newest.
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
    """Return the content of this process's claim, always the same: claiming twice is no second
    claim (``Files.create_new``)."""
    return json.dumps(
        {"writer": process_nonce(), "host": os.uname().nodename, "pid": os.getpid()}
    ).encode()


def _is_succeeded(run_dir: RunDir, claim: Origin, by: int) -> bool:
    """Return whether a claim was marked before, and mark it. A claim that does not exist is
    created: nobody can claim it any more."""
    found = _read(run_dir, claim)
    if "successor" in found:
        return True
    run_dir.files.write(run_dir.claim_path(claim), json.dumps({**found, "successor": by}).encode())
    return False


def _read(run_dir: RunDir, claim: Origin) -> dict[str, Any]:
    """Return a claim's content; {} where there is none, or it is just being written."""
    try:
        found = json.loads(run_dir.files.read(run_dir.claim_path(claim)))
    except (StorageNotFound, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
