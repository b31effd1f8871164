"""The checkpoints of a run: start one, list them, find the newest that is valid, delete."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

from storage.checkpoints.manifest import Manifest
from storage.checkpoints.reader import CheckpointReader, in_lineage, named
from storage.checkpoints.retention import RestorePoints, Retention
from storage.checkpoints.writer import CheckpointWriter, begin_checkpoint
from storage.errors import CorruptCheckpoint, StorageNotFound, StorageUnavailable
from storage.run_dir import CheckpointName, RunDir

T = TypeVar("T")


@dataclass(frozen=True)
class Rejected:
    """A committed checkpoint that cannot be trusted."""

    name: str
    problem: str


class CheckpointStore(CheckpointReader):
    """All checkpoints of one run. Picklable. Do not delete in one thread while another reads.

    A store remembers which checkpoints it found corrupt: in a process, code that restores and code
    that deletes share one store.
    """

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(run_dir)
        self._points = RestorePoints(run_dir)
        self._rejected: set[str] = set()
        """Checkpoints that this object found to be corrupt."""
        self._retention = Retention(self, run_dir, self._points, self._rejected)
        self.retain = self._retention.retain
        self.collect_orphans = self._retention.collect_orphans

    def __reduce__(self) -> tuple[object, ...]:
        return CheckpointStore, (self._run_dir,)

    def begin(self, step: int, submission: int, attempt: int) -> CheckpointWriter:
        """Start to write ``step-STEP.sSUBMISSION.aATTEMPT``. Replace unfinished or corrupt files of
        an earlier writer.

        Raises:
            CheckpointExists: it is committed and verifies. Its manifest names the writer.
        """
        name = CheckpointName(step, submission, attempt)

        def is_sound() -> bool:
            try:
                self.verify(str(name))
            except (CorruptCheckpoint, StorageNotFound):
                return False
            return True

        self._rejected.discard(str(name))
        self._retention.forget(name)
        return begin_checkpoint(self._run_dir, name, is_sound)

    def list(self) -> builtins.list[Manifest]:
        """Return every checkpoint with a valid manifest, oldest first (step, submission, attempt).
        Files are not read."""
        return self._manifests(named(self.entries()))

    def lineage(self) -> builtins.list[Manifest]:
        """Return the checkpoints of the committed lineage, oldest first: all but those from which a
        newer attempt did not continue."""
        return self._manifests(self._lineage_names())

    def newest_valid(self) -> tuple[Manifest | None, builtins.list[Rejected]]:
        """Return the newest checkpoint of the lineage that verifies, and the newer ones that do
        not. Every file is read back.

        Raises StorageError if the storage itself fails: that must not send a run back to an older
        checkpoint.
        """
        newest, _, rejected = self.read_newest(lambda manifest: self.verify(manifest.name))
        return newest, rejected

    def read_newest(
        self,
        read: Callable[[Manifest], T],
        reported: Collection[CheckpointName] = (),
    ) -> tuple[Manifest | None, T | None, builtins.list[Rejected]]:
        """Return the newest checkpoint that verifies, the result of ``read`` for it, and the newer
        ones that do not verify. Each file is read once.

        Args:
            read: raises CorruptCheckpoint if the checkpoint differs from its manifest, as
                ``read_file`` does.
            reported: checkpoints that must exist (``reported_checkpoints``), listed or not.
                Missing ones are rejected like corrupt ones.

        Raises:
            StorageUnavailable: all of ``reported`` are missing and there is no other checkpoint.
                The storage has lost its content, and the run must not start from scratch because of
                that.
        """
        rejected: builtins.list[Rejected] = []
        num_missing = 0
        for name in reversed(self._lineage_names(reported)):
            try:
                manifest = self.manifest(str(name))
                return manifest, read(manifest), rejected
            except StorageNotFound:
                if name in reported:  # otherwise it was deleted since it was listed
                    num_missing += 1
                    rejected.append(
                        Rejected(
                            str(name),
                            "the journal says it was committed, but it no longer exists",
                        )
                    )
            except CorruptCheckpoint as exc:
                self._rejected.add(str(name))
                rejected.append(Rejected(str(name), str(exc)))
        if num_missing and num_missing == len(rejected):
            raise StorageUnavailable(
                f"run {self._run_dir.run_id} committed {rejected[0].name} according to its "
                f"journal, but {self._run_dir.uri} has no checkpoint at all; mount or restore "
                "what is missing. To start from scratch, submit the spec as a new run"
            )
        return None, None, rejected

    def damage(self, name: str) -> str:
        """Flip one byte of a checkpoint's smallest file, like a failing disk; for drills. Return
        the file's relative path.

        Raises StorageNotFound; CorruptCheckpoint if its manifest is already damaged.
        """
        sizes = {
            relpath: entry.size_bytes
            for relpath, entry in self.manifest(name).files.items()
            if entry.size_bytes
        }
        relpath = min(sizes, key=lambda each: sizes[each])
        path = f"{self.directory(name)}/{relpath}"
        data = bytearray(self._files.read(path, sizes[relpath]))
        data[len(data) // 2] ^= 0xFF
        self._files.write(path, bytes(data))
        return relpath

    def missing(self, reported: Iterable[CheckpointName]) -> builtins.list[str]:
        """Return which of these reported checkpoints do not exist, oldest first. One newer than all
        existing ones is left out: it may not be listed yet."""
        there = set(self.committed(self.entries()))
        return [str(name) for name in sorted(set(reported) - there) if there and name < max(there)]

    def _lineage_names(
        self, reported: Collection[CheckpointName] = ()
    ) -> builtins.list[CheckpointName]:
        names = {*self.committed(self.entries()), *reported}
        return in_lineage(names, self._points.update())

    def _manifests(self, names: builtins.list[CheckpointName]) -> builtins.list[Manifest]:
        found: builtins.list[Manifest] = []
        for name in names:
            try:
                found.append(self.manifest(str(name)))
            except (CorruptCheckpoint, StorageNotFound):
                continue  # newest_valid() reports it, or it was deleted since it was listed
        return found
