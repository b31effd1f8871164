"""The files that tell drivers which checkpoints other runs are to begin from, so that retention leaves them alone."""

from __future__ import annotations

from service.db.checkpoints import CheckpointRecords
from storage.errors import CorruptFile
from storage.filesystem import Storage


class KeptSteps:
    """Writes the files from the database's rows. Synchronous: call it in a thread."""

    def __init__(self, storage: Storage, records: CheckpointRecords) -> None:
        self._storage = storage
        self._records = records
        self._told: set[str] | None = None
        """Runs whose file may hold steps; None before the first look, which goes over all that have not ended."""

    def hold(self, run_id: str, step: int) -> None:
        """Have a run keep a checkpoint for another one whose row is not there yet. Raises StorageError, DatabaseError."""
        self._tell(run_id, self._records.awaited().get(run_id, frozenset()) | {step})

    def publish(self) -> None:
        """Make the files say what the database says. Raises StorageError, DatabaseError; the next call heals them."""
        wanted = self._records.awaited()
        candidates = wanted.keys() | (set(self._records.unended()) if self._told is None else self._told)
        for run_id in sorted(candidates):
            self._tell(run_id, wanted.get(run_id, frozenset()))
        self._told = set(wanted)

    def _tell(self, run_id: str, steps: frozenset[int]) -> None:
        run_dir = self._storage.run_dir(run_id)
        try:
            if run_dir.kept_steps() == steps:
                return
        except CorruptFile:
            pass  # written anew
        run_dir.keep_steps(steps)
