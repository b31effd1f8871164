"""The file that tells drivers which nodes are marked, kept equal to the database."""

from __future__ import annotations

from collections.abc import Callable

from service.db.node_marks import NodeMarkStore
from storage.cluster.node_marks import encode_marks, read_marks_file, write_marks_file
from storage.filesystem import Storage


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
