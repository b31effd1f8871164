"""Attempts with their ends, from the events of a run."""

from __future__ import annotations

import pytest

from everstep.wire.events import EventKind
from service.model.rows import EventRow
from service.projections import attempts
from tests.support.api_service import NOON
from tests.support.projected_events import WORKERS, event


def test_attempts_with_their_ends() -> None:
    found = attempts.attempts(
        [
            event(EventKind.SUBMISSION_STARTED),
            event(EventKind.ATTEMPT_STARTED, at=NOON, world_size=1, workers=WORKERS),
            event(EventKind.RESTORED, step=0, epoch=0, source="fresh", checkpoint=None),
            event(EventKind.CHECKPOINT_COMMITTED, step=10),
            event(EventKind.FAILURE, verdict="worker_lost", step=12),
            event(EventKind.ATTEMPT_ENDED, at=NOON + 5, cause="worker_lost", last_step=13),
            event(EventKind.ATTEMPT_STARTED, at=NOON + 6, attempt=2, world_size=1, workers=WORKERS),
            event(
                EventKind.RESTORED,
                step=10,
                epoch=1,
                source="checkpoint",
                checkpoint="step-000000010.s001.a001",
            ),
            event(EventKind.SUBMISSION_STARTED, at=NOON + 9, submission=2),
            event(
                EventKind.ATTEMPT_STARTED,
                at=NOON + 10,
                submission=2,
                attempt=3,
                world_size=1,
                workers=WORKERS,
            ),
        ]
    )
    assert [(a.attempt, a.submission, a.first_step, a.last_step, a.cause) for a in found] == [
        (1, 1, 0, 13, "worker_lost"),
        (2, 1, 10, None, "control_plane"),
        (3, 2, None, None, None),
    ]
    assert found[1].restored_from == "step-000000010.s001.a001"
    assert [(a.ended_at.timestamp() if a.ended_at else None) for a in found] == [
        NOON + 5,
        NOON + 9,
        None,
    ]
    assert found[0].workers[0].pid == 7


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        (event(EventKind.FINISHED, outcome="succeeded"), "finished"),
        (event(EventKind.FINISHED, outcome="stopped"), "stopped"),
        (event(EventKind.FINISHED, outcome="failed"), "unknown"),
        (event("status", to="CANCELLED"), "stopped"),
        (event("status", to="STOPPING"), None),
    ],
)
def test_an_attempt_whose_end_was_not_recorded(last: EventRow, cause: str | None) -> None:
    [found] = attempts.attempts(
        [event(EventKind.ATTEMPT_STARTED, world_size=1, workers=WORKERS), last]
    )
    assert found.cause == cause
    assert (found.ended_at is None) == (cause is None)
