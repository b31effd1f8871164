"""Compute what one event changes about its run. Pure, so that a journal can be applied again with
the same result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from everstep.wire.events import EventKind
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from service.projections import changes, drills
from service.projections.changes import Changes


def project(run: RunRow, event: EventRow) -> Changes:
    """Return what ``event`` changes about ``run``; empty Changes for kinds that change nothing.

    Unknown kinds only become history, so that an older service can read a newer driver.
    """
    handler = _HANDLERS.get(event.kind)
    return handler(run, event) if handler else Changes()


_HANDLERS: Final[Mapping[str, Callable[[RunRow, EventRow], Changes]]] = {
    EventKind.ATTEMPT_STARTED: changes.attempt_started,
    EventKind.RESTORED: changes.restored,
    EventKind.TRAINING_STARTED: changes.training_started,
    EventKind.SNAPSHOTS: changes.snapshots,
    EventKind.METRICS: changes.metrics,
    EventKind.RANK_USE: changes.rank_use,
    EventKind.GPU_USE: changes.gpu_use,
    EventKind.EVALUATED: changes.evaluated,
    EventKind.EPOCH_COMPLETED: changes.epoch_completed,
    EventKind.CHECKPOINT_COMMITTED: changes.checkpoint_committed,
    EventKind.CHECKPOINT_DELETED: changes.checkpoint_gone,
    EventKind.CHECKPOINT_CORRUPT: changes.checkpoint_gone,
    EventKind.CHECKPOINT_FAILED: changes.checkpoint_failed,
    EventKind.FAILURE: changes.failure,
    EventKind.RECOVERED: changes.recovered,
    EventKind.WAITING: changes.waiting,
    EventKind.ATTEMPT_ENDED: changes.attempt_ended,
    EventKind.REPLAY_COMPARED: drills.compared,
    EventKind.FINISHED: changes.finished,
}
