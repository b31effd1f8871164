"""Copies of database rows in the storage, which drivers read: marks of nodes, and checkpoints to
keep.

Imports the database. The API and the reconciler import it.
"""

from __future__ import annotations

from collections.abc import Callable

from service.db.checkpoints import CheckpointRecords
from service.db.node_marks import NodeMarkStore
from storage.cluster import encode_marks, read_marks_file, write_marks_file
from storage.errors import CorruptFile
from storage.filesystem import Storage
from storage.run_control import Kept
from storage.run_dir import RunDir

# ---------------------------------------------------------------- node marks

# The file that tells drivers which nodes are marked, kept equal to the database.


class MarksFile:
    """Writes the file from the database's rows. Synchronous: call it in a thread.

    ``require`` raises StorageMismatch unless the storage is the database's.
    """

    def __init__(self, storage: Storage, marks: NodeMarkStore, require: Callable[[], None]) -> None:
        self._require = require
        self._storage = storage
        self._marks = marks

    def publish(self) -> bool:
        """Make the file say what the database says; whether it had to be written.

        Whoever writes looks at the database once more afterwards. Two writers at a time, of one
        process or of two, therefore leave the newer words, whichever of them wrote last.

        Raises:
            StorageMismatch: The storage is not this database's; its marks stay as they are.
            StorageError: The file may be old; the next call heals it.
            DatabaseError: Nothing was written.
        """
        self._require()
        wanted = self._wanted()
        if read_marks_file(self._storage) == wanted:
            return False
        while True:
            write_marks_file(self._storage, wanted)
            now_wanted = self._wanted()
            if now_wanted == wanted:
                return True
            wanted = now_wanted

    def _wanted(self) -> bytes:
        return encode_marks(
            mark for row in self._marks.all().values() if (mark := row.mark) is not None
        )


# ---------------------------------------------------------------- kept checkpoints

# The files that tell drivers which checkpoints other runs are to begin from, and which are
# damaged, so that retention knows.


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
