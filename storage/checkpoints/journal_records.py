"""What a run's journals record about checkpoints: where each attempt started, and what was
committed."""

from __future__ import annotations

from everstep.wire.events import EventKind
from storage.checkpoints.lineage import RestorePoint, restore_point
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from storage.run_names import CheckpointName, Origin

_BATCH = 5000


class RestorePoints:
    """Where each attempt of a run started, by (submission, attempt). Attempts that never trained
    are left out."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._cursors: dict[int, str] = {}
        self.found: dict[Origin, RestorePoint] = {}

    def update(self) -> dict[Origin, RestorePoint]:
        """Read new events of all journals since the last call, and return all restore points.
        Raises StorageError."""
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
                    self.found.setdefault((submission, event.attempt), restore_point(event.data))
                if not events:
                    break
        return self.found


def attempt_starts(run_dir: RunDir) -> dict[Origin, RestorePoint]:
    """Return where each attempt of the run started. Reads all journals."""
    return RestorePoints(run_dir).update()


def reported_checkpoints(run_dir: RunDir) -> set[CheckpointName]:
    """Return the checkpoints that the journals report as committed and not as deleted. A listing of
    the storage should contain them.

    Reads all journals. An older checkpoint may still be missing, if the process that deleted it
    died before it could report that.
    """
    kinds = (EventKind.CHECKPOINT_COMMITTED, EventKind.CHECKPOINT_DELETED)
    reported: set[CheckpointName] = set()
    for submission in run_dir.submissions():
        cursor: str | None = None
        while True:
            events, cursor = read_journal(
                run_dir, submission, cursor, _BATCH, kinds, past_damage=True
            )
            for event in events:
                name = CheckpointName.parse(str(event.data.get("name")))
                if name is not None and event.kind is EventKind.CHECKPOINT_COMMITTED:
                    reported.add(name)
                elif name is not None:
                    reported.discard(name)
            if not events:
                break
    return reported
