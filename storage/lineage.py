"""Which checkpoints count: what a newer submission did not go on from is void (invariant I1).

A submission's restore point is the first ``restored`` event of its journal. An older submission that was slow rather than
dead may commit checkpoints after that; they lie beyond the restore point and are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep.events import BEGINNINGS, EventKind
from storage.journal import JournalEvent, read_journal
from storage.run_dir import CheckpointName, RunDir

_BATCH = 200
_LARGE_BATCH = 5000


@dataclass(frozen=True)
class RestorePoint:
    """Where a submission, or an attempt, went on from."""

    step: int
    """Steps done; nothing older that lies beyond it counts."""
    fresh: bool
    """It began anew, or again from another run's checkpoint: nothing older counts at all."""


def restore_point(run_dir: RunDir, submission: int) -> RestorePoint | None:
    """The first ``restored`` event of a submission's journal; None as long as there is none."""
    cursor: str | None = None
    while True:
        events, cursor = read_journal(run_dir, submission, cursor, _BATCH)
        if not events:
            return None
        for event in events:
            if event.kind is EventKind.RESTORED:
                return _point(event)


def attempt_starts(run_dir: RunDir) -> dict[tuple[int, int], RestorePoint]:
    """Where each attempt of the run began, by (submission, attempt); attempts that never began to train are left out.

    Looks through all journals.
    """
    found: dict[tuple[int, int], RestorePoint] = {}
    for submission in run_dir.submissions():
        cursor: str | None = None
        while True:
            events, cursor = read_journal(run_dir, submission, cursor, _LARGE_BATCH, (EventKind.RESTORED,))
            found |= {(submission, event.attempt): _point(event) for event in events}
            if not events:
                break
    return found


def told_checkpoints(run_dir: RunDir) -> set[CheckpointName]:
    """Checkpoints that the journals tell were committed, and do not tell were deleted: what a listing of the storage ought to show.

    Looks through all journals. An older one that is not there may have been deleted by a process that died before it told.
    """
    kinds = (EventKind.CHECKPOINT_COMMITTED, EventKind.CHECKPOINT_DELETED)
    told: set[CheckpointName] = set()
    for submission in run_dir.submissions():
        cursor: str | None = None
        while True:
            events, cursor = read_journal(run_dir, submission, cursor, _LARGE_BATCH, kinds)
            for event in events:
                name = CheckpointName.parse(str(event.data.get("name")))
                if name is not None and event.kind is EventKind.CHECKPOINT_COMMITTED:
                    told.add(name)
                elif name is not None:
                    told.discard(name)
            if not events:
                break
    return told


def _point(event: JournalEvent) -> RestorePoint:
    return RestorePoint(int(event.data["step"]), event.data.get("source") in BEGINNINGS)


def in_lineage(names: Iterable[CheckpointName], restore_points: Mapping[int, RestorePoint]) -> list[CheckpointName]:
    """Names that every newer submission's restore point lets stand, oldest first.

    Args:
        restore_points: by submission; those without one have not chosen yet and void nothing.
    """

    def counts(name: CheckpointName) -> bool:
        return all(
            name.submission >= submission or (not point.fresh and name.step <= point.step)
            for submission, point in restore_points.items()
        )

    return sorted(filter(counts, names))
