"""Who owns a run: every submission and every attempt claims it by a file of its own, and marks
those before it as succeeded.

An attempt does both before it looks at what there is to go on from. So who asks by its own claim
whether it is still the newest, and hears yes, was so when it asked, whatever it did or did not hear
from anybody else: a rank that is cut off from all but the storage knows, too. The claim is opened
by its name; a listing of a network filesystem may be a minute old.
"""

from __future__ import annotations

import json
import os
from typing import Any

from storage.errors import AlreadyClaimed, StorageNotFound
from storage.filesystem import require_exclusive_creates
from storage.process_nonce import process_nonce
from storage.run_dir import Origin, RunDir

_GAP = 3
"""How many numbers in a row may be of submissions, or attempts, that never came to claim
anything."""


def claim_submission(run_dir: RunDir, submission: int) -> None:
    """Take a submission's number for this process.

    Raises:
        AlreadyClaimed: another process has it.
        InvalidStorage: the storage cannot tell them apart.
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
    """Mark older submissions as succeeded by this one: what is left of them commits and deletes
    nothing any more."""
    for older in range(submission - 1, max(0, submission - 1 - _GAP), -1):
        if _is_succeeded(run_dir, (older, 0), submission):
            return


def claim_attempt(run_dir: RunDir, origin: Origin) -> None:
    """Claim an attempt for this process, and mark the older ones of its submission as succeeded.

    Raises AlreadyClaimed where a newer one has succeeded it, or another process has claimed it.
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
    """The newest attempt of a submission that its journal knows, or that has claimed the run and
    died before it was told of."""
    while run_dir.files.exists(run_dir.claim_path((submission, known + 1))):
        known += 1
    return known


def successor(run_dir: RunDir, origin: Origin) -> str | None:
    """Who has taken over from an attempt, in words; None while it is the newest. Raises
    StorageError."""
    for claim, what in (((origin[0], 0), "submission"), (origin, "attempt")):
        number = _read(run_dir, claim).get("successor")
        if number is not None:
            return (
                f"{what} {number} of run {run_dir.run_id} has taken over from {what} "
                f"{claim[claim[1] > 0]}"
            )
    return None


def _claim() -> bytes:
    """The same whenever this process claims: to claim again what is its own is no second claim
    (``Files.create_new``)."""
    return json.dumps(
        {"writer": process_nonce(), "host": os.uname().nodename, "pid": os.getpid()}
    ).encode()


def _is_succeeded(run_dir: RunDir, claim: Origin, by: int) -> bool:
    """Whether a claim was marked before; it is now. One that is not there yet is made: it can be
    claimed no more."""
    found = _read(run_dir, claim)
    if "successor" in found:
        return True
    run_dir.files.write(run_dir.claim_path(claim), json.dumps({**found, "successor": by}).encode())
    return False


def _read(run_dir: RunDir, claim: Origin) -> dict[str, Any]:
    """What a claim says; nothing where there is none, or one that is just being written."""
    try:
        found = json.loads(run_dir.files.read(run_dir.claim_path(claim)))
    except (StorageNotFound, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
