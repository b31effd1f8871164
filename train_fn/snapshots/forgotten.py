"""Remove old snapshots that no run needs from a node, when a worker starts there.

The end of a run removes its snapshots from every reachable node. Snapshots remain on nodes that
could not be reached, and of runs that never ended.
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

logger = logging.getLogger(__name__)

FORGOTTEN_S = 24 * 3600.0
"""Snapshots unchanged for this many seconds are removed, unless their run may still resume from
them."""
ABANDONED_S = 30 * FORGOTTEN_S
"""Snapshots unchanged for this many seconds are removed in any case."""


def sweep_forgotten(ctx: WorkerContext) -> threading.Thread | None:
    """Remove old snapshots of other runs from this node. Return the thread that does so; None if
    there are none.

    A thread is used because it reads the run's storage, which may be slow or unavailable.
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
    """Remove those directories that no run needs. ``reached`` is the URI of a storage that is known
    to be available."""
    for directory in directories:
        with suppress(OSError):
            needed = any(_may_count(directory.name, label, reached) for label in _labels(directory))
            if not needed or _age_s(directory) > ABANDONED_S:
                logger.info("removing the snapshots that run %s left on this node", directory.name)
                for place in (directory, node_dir.states_on_disk(directory.name)):
                    shutil.rmtree(place, ignore_errors=True)


def _age_s(directory: Path) -> float:
    """Return the seconds since the last change in a run's directory; 0 if it cannot be read, as
    while it is being removed."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except OSError:
        return 0.0


def _labels(directory: Path) -> list[Label]:
    """Return the labels of readable snapshots in a run's directory."""
    return [
        label
        for place in directory.iterdir()
        for label in labels_in(place)
        if label.problem is None
    ]


def _may_count(run_id: str, label: Label, reached: str) -> bool:
    """Return whether the run may still resume from a snapshot: it has not ended, and has no
    checkpoint of this step or a later one."""
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
    """Return whether the newest submission's journal says that the run cannot continue. Raise
    StorageError if it cannot be read."""
    events, _ = read_journal(run_dir, submission, None, 1, (EventKind.FINISHED,), past_damage=True)
    if not events:
        return False
    code = (events[0].data.get("reason") or {}).get("code")
    return events[0].data["outcome"] != "stopped" or code == ReasonCode.CANCELLED_BY_USER.value
