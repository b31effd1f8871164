"""Compute what one event changes about its run. Pure, so that a journal can be applied again with
the same result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from everstep.wire.events import EventKind
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from service.projections import attempt_changes, checkpoint_changes, metric_changes, replays
from service.projections.changes import Changes


def project(run: RunRow, event: EventRow) -> Changes:
    """Return what ``event`` changes about ``run``; empty Changes for kinds that change nothing.

    Unknown kinds only become history, so that an older service can read a newer driver.
    """
    handler = _HANDLERS.get(event.kind)
    return handler(run, event) if handler else Changes()


_HANDLERS: Final[Mapping[str, Callable[[RunRow, EventRow], Changes]]] = {
    EventKind.ATTEMPT_STARTED: attempt_changes.attempt_started,
    EventKind.RESTORED: checkpoint_changes.restored,
    EventKind.TRAINING_STARTED: attempt_changes.training_started,
    EventKind.SNAPSHOTS: attempt_changes.snapshots,
    EventKind.METRICS: metric_changes.metrics,
    EventKind.RANK_USE: metric_changes.rank_use,
    EventKind.GPU_USE: metric_changes.gpu_use,
    EventKind.EVALUATED: metric_changes.evaluated,
    EventKind.EPOCH_COMPLETED: metric_changes.epoch_completed,
    EventKind.CHECKPOINT_COMMITTED: checkpoint_changes.checkpoint_committed,
    EventKind.CHECKPOINT_DELETED: checkpoint_changes.checkpoint_gone,
    EventKind.CHECKPOINT_CORRUPT: checkpoint_changes.checkpoint_gone,
    EventKind.CHECKPOINT_FAILED: checkpoint_changes.checkpoint_failed,
    EventKind.FAILURE: attempt_changes.failure,
    EventKind.RECOVERED: attempt_changes.recovered,
    EventKind.WAITING: attempt_changes.waiting,
    EventKind.ATTEMPT_ENDED: attempt_changes.attempt_ended,
    EventKind.REPLAY_COMPARED: replays.compared,
    EventKind.FINISHED: attempt_changes.finished,
}
