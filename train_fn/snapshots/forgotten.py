"""Snapshots that no run needs any more: removed by age from a node's shared memory by whoever
starts there.

A run's end removes them from every node that can be reached. What is left is of nodes that could
not be, and of runs that nobody ended.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

from everstep.wire import ReasonCode
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from train_fn.context import WorkerContext
from train_fn.node import node_dir
from train_fn.snapshots.last_save import newest_durable
from train_fn.snapshots.store import Label, labels_in

FORGOTTEN_S = 24 * 3600.0
"""Snapshots that nobody touched for so long are removed, unless their run may still go on from
them,"""
ABANDONED_S = 30 * FORGOTTEN_S
"""and after so long in any case."""

logger = logging.getLogger(__name__)


def sweep_forgotten(ctx: WorkerContext) -> threading.Thread | None:
    """Remove what runs left here whose end this node did not see. None where there is nothing that
    old.

    On a thread: to learn whether a run lives its storage is read, which may be slow or away.
    """
    old = [
        directory
        for directory in node_dir.shared_memory_root().iterdir()
        if directory.is_dir()
        and directory.name != ctx.run_dir.run_id
        and _age_s(directory) > FORGOTTEN_S
    ]
    if not old:
        return None
    thread = threading.Thread(
        target=_sweep, args=(old, ctx.run_dir.storage.uri), name="sweep-forgotten", daemon=True
    )
    thread.start()
    return thread


def _sweep(directories: list[Path], reached: str) -> None:
    """``reached`` is the URI of a storage that is known to be there."""
    for directory in directories:
        with suppress(OSError):
            needed = any(_may_count(directory.name, label, reached) for label in _labels(directory))
            if not needed or _age_s(directory) > ABANDONED_S:
                logger.info("removing the snapshots that run %s left on this node", directory.name)
                shutil.rmtree(directory, ignore_errors=True)


def _age_s(directory: Path) -> float:
    """Seconds since anything in a run's directory changed; 0 where it is being removed."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except OSError:
        return 0.0


def _labels(directory: Path) -> list[Label]:
    """Those of states that are there."""
    return [
        label
        for place in directory.iterdir()
        for label in labels_in(place)
        if label.problem is None
    ]


def _may_count(run_id: str, label: Label, reached: str) -> bool:
    """Whether the run may still go on from a snapshot: it has not ended, and has no checkpoint that
    is as new."""
    if label.storage is None:  # left by an older Everstep
        return False
    try:
        run_dir = RunDir(open_storage(label.storage), run_id)
        submission = max(run_dir.submissions(), default=0)
        if not submission:  # the run was deleted, or its storage is not mounted here
            return label.storage != reached
        return not _has_ended(run_dir, submission) and newest_durable(run_dir) < label.step
    except Exception as exc:
        logger.warning(
            "whether run %s still needs its snapshots is not known, so they stay: %s", run_id, exc
        )
        return True


def _has_ended(run_dir: RunDir, submission: int) -> bool:
    """Whether the journal of the newest submission says that the run cannot go on. Raises
    StorageError."""
    events, _ = read_journal(run_dir, submission, None, 1, (EventKind.FINISHED,), past_damage=True)
    if not events:
        return False
    code = (events[0].data.get("reason") or {}).get("code")
    return events[0].data["outcome"] != "stopped" or code == ReasonCode.CANCELLED_BY_USER.value
