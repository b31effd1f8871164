"""Report a run's saves to the journal, including those whose rank died before it could report
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everstep.wire.events import EventKind
from storage.checkpoints.journal_records import reported_checkpoints
from storage.checkpoints.manifest import Manifest
from storage.run_names import CheckpointName
from train_fn.context import WorkerContext


def committed_data(
    manifest: Manifest, stall_s: float = 0.0, write_s: float = 0.0
) -> dict[str, Any]:
    """Return the data of the event that reports a committed checkpoint."""
    return {
        "step": manifest.step,
        "epoch": manifest.epoch,
        "name": manifest.name,
        "size_bytes": manifest.size_bytes,
        "digest": manifest.digest,
        "metrics": manifest.metrics,
        "stall_s": round(stall_s, 6),
        "write_s": round(write_s, 6),
    }


class SaveEvents:
    """Report saves on rank 0, the rank that saves. The saver's threads call this."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._has_caught_up = (ctx.submission, ctx.attempt) == (1, 1)

    def committed(self, manifest: Manifest, stall_s: float = 0.0, write_s: float = 0.0) -> None:
        """Report a committed checkpoint. ``stall_s`` is the time for which the copy blocked
        training, ``write_s`` that of the write, both in seconds."""
        self._ctx.journal.emit(
            EventKind.CHECKPOINT_COMMITTED, committed_data(manifest, stall_s, write_s)
        )

    def deleted(self, names: Sequence[str]) -> None:
        """Report checkpoints that were deleted."""
        for name in names:
            parsed = CheckpointName.parse(name)
            assert parsed is not None
            self._ctx.journal.emit(
                EventKind.CHECKPOINT_DELETED, {"step": parsed.step, "name": name}
            )

    def failed(self, step: int, error: str, failures: dict[str, Any]) -> None:
        """Report a save that failed, with ``SaveFailures.facts``."""
        self._ctx.journal.emit(
            EventKind.CHECKPOINT_FAILED, {"step": step, "error": error, **failures}
        )

    def cadence(self, step: int, chosen: dict[str, Any]) -> None:
        """Report an interval that ``every_steps: auto`` chose."""
        self._ctx.journal.emit(EventKind.CHECKPOINT_CADENCE, {"step": step, **chosen})

    def catch_up(self) -> None:
        """Report, once in an attempt, checkpoints that earlier attempts committed or deleted but
        did not report. Their rank may have died first.

        Call this before this attempt saves. Raise StorageError if journals or checkpoints cannot be
        read; the next call tries again.
        """
        if self._has_caught_up:
            return
        store, reported = self._ctx.checkpoints, reported_checkpoints(self._ctx.run_dir)
        for manifest in store.lineage():
            if CheckpointName.parse(manifest.name) not in reported:
                self.committed(manifest)
        self.deleted(store.missing(reported))
        self._has_caught_up = True
