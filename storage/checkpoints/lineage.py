"""Which checkpoints count: what a newer attempt did not go on from is void (invariant I1).

An attempt's restore point is its ``restored`` event, which is durable before the attempt takes a
step. An older attempt that was slow rather than dead may commit checkpoints after that; they lie
beyond the restore point and are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep.wire.events import BEGINNINGS, EventKind
from storage.logs.journal import JournalEvent, read_journal
from storage.run_dir import CheckpointName, Origin, RunDir

_BATCH = 5000


@dataclass(frozen=True)
class RestorePoint:
    """Where an attempt went on from."""

    step: int
    """Steps done; nothing older that lies beyond it counts."""
    fresh: bool
    """It began anew, or again from another run's checkpoint: nothing older counts at all."""


class RestorePoints:
    """Where each attempt of a run began, by (submission, attempt); attempts that never began to
    train are left out."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._cursors: dict[int, str] = {}
        self.found: dict[Origin, RestorePoint] = {}

    def update(self) -> dict[Origin, RestorePoint]:
        """Look through all journals for what is new since the last time. Raises StorageError."""
        for submission in self._run_dir.submissions():
            while True:
                cursor = self._cursors.get(submission)
                events, self._cursors[submission] = read_journal(
                    self._run_dir,
                    submission,
                    cursor,
                    _BATCH,
                    (EventKind.RESTORED,),
                    past_damage=True,
                )
                for event in events:
                    # the first one stays the first
                    self.found.setdefault((submission, event.attempt), _point(event))
                if not events:
                    break
        return self.found


def attempt_starts(run_dir: RunDir) -> dict[Origin, RestorePoint]:
    """Where each attempt of the run began. Looks through all journals."""
    return RestorePoints(run_dir).update()


def told_checkpoints(run_dir: RunDir) -> set[CheckpointName]:
    """Checkpoints that the journals tell were committed, and do not tell were deleted: what a
    listing of the storage ought to show.

    Looks through all journals. An older one that is not there may have been deleted by a process
    that died before it told.
    """
    kinds = (EventKind.CHECKPOINT_COMMITTED, EventKind.CHECKPOINT_DELETED)
    told: set[CheckpointName] = set()
    for submission in run_dir.submissions():
        cursor: str | None = None
        while True:
            events, cursor = read_journal(
                run_dir, submission, cursor, _BATCH, kinds, past_damage=True
            )
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


def in_lineage(
    names: Iterable[CheckpointName], restore_points: Mapping[Origin, RestorePoint]
) -> list[CheckpointName]:
    """Names that every newer attempt's restore point lets stand, oldest first.

    Args:
        restore_points: by (submission, attempt); those without one have not chosen yet and void
            nothing.
    """

    def counts(name: CheckpointName) -> bool:
        return all(
            not is_newer(origin, name) or (not point.fresh and name.step <= point.step)
            for origin, point in restore_points.items()
        )

    return sorted(filter(counts, names))


def is_newer(origin: Origin, name: CheckpointName) -> bool:
    """Whether an attempt comes after the one that writes a checkpoint. Of a name that says only the
    submission no attempt is known: attempts of the same one are not newer."""
    return origin > name.origin if name.attempt else origin[0] > name.submission
