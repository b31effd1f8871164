"""The files that tell drivers which checkpoints other runs are to begin from, and which are
damaged, so that retention knows."""

from __future__ import annotations

from service.db.checkpoints import CheckpointRecords
from storage.errors import CorruptFile
from storage.filesystem import Storage
from storage.run_control import Kept
from storage.run_dir import RunDir


class KeptSteps:
    """Writes the files from the database's rows. Synchronous: call it in a thread."""

    def __init__(self, storage: Storage, records: CheckpointRecords) -> None:
        self._storage = storage
        self._records = records
        self._written: set[str] | None = None
        """Runs whose file may hold something; None before the first look, which goes over all that
        have not ended."""

    def hold(self, run_id: str, step: int) -> None:
        """Have a run keep a checkpoint for another one whose row is not there yet. Raises
        StorageError, DatabaseError."""
        known = self._wanted().get(run_id, Kept())
        self._write(run_id, Kept(known.steps | {step}, known.corrupt))

    def publish(self) -> None:
        """Make the files say what the database says. Raises StorageError, DatabaseError; the next
        call heals them."""
        wanted = self._wanted()
        candidates = wanted.keys() | (
            set(self._records.unended()) if self._written is None else self._written
        )
        for run_id in sorted(candidates):
            self._write(run_id, wanted.get(run_id, Kept()))
        self._written = set(wanted)

    def _wanted(self) -> dict[str, Kept]:
        awaited, corrupt = self._records.awaited(), self._records.corrupt()
        none: frozenset[str] = frozenset()
        return {
            run_id: Kept(awaited.get(run_id, frozenset()), corrupt.get(run_id, none))
            for run_id in awaited.keys() | corrupt.keys()
        }

    def _write(self, run_id: str, kept: Kept) -> None:
        run_dir = RunDir(self._storage, run_id)
        try:
            if run_dir.kept() == kept:
                return
        except CorruptFile:
            pass  # written anew
        run_dir.keep_steps(kept.steps, kept.corrupt)
