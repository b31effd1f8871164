"""Decide when the next checkpoint is due: by steps, by time, or by how long a save takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everstep.spec.sections import CheckpointSpec
from everstep.wire.events import EventKind
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.retention import reported_checkpoints
from storage.run_control import Stop
from storage.run_dir import CheckpointName
from train_fn.context import WorkerContext

AUTO_SHARE = 0.05
"""Share of the time for which ``every_steps: auto`` lets a checkpoint be written."""
AUTO_LEAST_S, AUTO_MOST_S = 5.0, 1800.0
"""Bounds of its interval. The first save comes after the shortest one: how long one takes is not
known before."""


class SaveCadence:
    """Decide on rank 0 when periodic checkpoints are due. Times are seconds on a monotonic clock.
    Not thread-safe."""

    def __init__(self, spec: CheckpointSpec, step: int, now: float) -> None:
        self._spec = spec
        self._saved_step, self._saved_at = step, now
        self.earliest_step = self._earliest_step()
        """No save is due before this step, at any time."""
        self._auto_s = AUTO_LEAST_S
        """The interval of ``auto``."""

    def is_due(self, step: int, now: float) -> bool:
        """Return whether to save the state after ``step``. A save that became due while it was not
        possible stays due."""
        if step < self.earliest_step:
            return False
        every_steps, every_s, passed_s = (
            self._spec.every_steps,
            self._spec.every_s,
            now - self._saved_at,
        )
        if isinstance(every_steps, int) and step // every_steps > self._saved_step // every_steps:
            return True
        if every_s is not None and passed_s >= every_s:
            return True
        return every_steps == "auto" and passed_s >= self._auto_s

    def begun(self, step: int, now: float) -> None:
        """Note that a save of ``step`` has started, due or not."""
        self._saved_step, self._saved_at = step, now
        self.earliest_step = self._earliest_step()

    def committed(self, write_s: float) -> None:
        """Note how many seconds a save took, with the copy that it began with."""
        self._auto_s = min(max(write_s / AUTO_SHARE, AUTO_LEAST_S), AUTO_MOST_S)

    def _earliest_step(self) -> int:
        every_steps = self._spec.every_steps
        if not isinstance(every_steps, int) or self._spec.every_s is not None:
            return self._saved_step + 1
        return (self._saved_step // every_steps + 1) * every_steps


# ---------------------------------------------------------------- save events

# Report a run's saves to the journal, including those whose rank died before it could report
# them.


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


# ---------------------------------------------------------------- save failures

# Decide after failed saves when to retry, and when the storage counts as unavailable.

RETRY_S = 1.0
"""Pause in seconds after the first failure. Each further one doubles it."""
RETRY_MAX_S = 60.0


class SaveFailures:
    """Count consecutive failures. Times are seconds on a monotonic clock. Not thread-safe."""

    def __init__(self, spec: CheckpointSpec) -> None:
        self._spec = spec
        self._retry_at = float("-inf")
        self.in_a_row = 0
        self.stop: Stop | None = None
        """``pause`` if the spec asks for it and the storage counts as unavailable."""

    @property
    def retry_s(self) -> float:
        """Return the pause in seconds after the last failure."""
        return (
            min(RETRY_MAX_S, RETRY_S * 2.0 ** min(self.in_a_row - 1, 16)) if self.in_a_row else 0.0
        )

    def facts(self) -> dict[str, Any]:
        """Return the count of failures, its limit, and the pause, for an event."""
        return {
            "failed_in_a_row": self.in_a_row,
            "max_failed_saves": self._spec.max_failed_saves,
            "retry_s": self.retry_s,
        }

    def failed(self, now: float) -> None:
        self.in_a_row += 1
        if self.in_a_row >= self._spec.max_failed_saves and self._spec.on_failed_saves == "pause":
            self.stop = "pause"
        self._retry_at = now + self.retry_s

    def succeeded(self) -> None:
        self.in_a_row, self._retry_at, self.stop = 0, float("-inf"), None

    def may_try(self, now: float) -> bool:
        """Return whether the pause after the last failure is over."""
        return now >= self._retry_at
