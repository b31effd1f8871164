"""A run's row and history as they begin."""

from __future__ import annotations

from typing import Any

from everstep.wire import RunStatus
from service.model.rows import RunRow, TransitionRow
from service.projections.goodput import TimeLedger


def new_row(run_id: str, spec: dict[str, Any], created_by: str, now: float) -> RunRow:
    """A run as it is before anything happened to it."""
    return RunRow(
        id=run_id,
        name=spec["name"],
        project=spec["project"],
        priority=spec["priority"],
        tags=spec["tags"],
        spec=spec,
        created_by=created_by,
        status=RunStatus.QUEUED,
        reason_code=None,
        reason_message=None,
        stop_requested=None,
        stop_requested_at=None,
        preempted_by=None,
        submission=0,
        workers_limit=None,
        shrunk=None,
        ray_job_id=None,
        submitted_at=None,
        attempt=0,
        epoch=0,
        step=0,
        total_steps=None,
        steps_per_epoch=None,
        world_size=None,
        workers=[],
        snapshots=None,
        guarantee=None,
        metrics={},
        best=None,
        latest_checkpoint=None,
        recent_checkpoints=[],
        restarts=0,
        steps_lost=0,
        steps_lost_at_restore=0,
        time_ledger=TimeLedger.begin(now).dump(),
        created_at=now,
        started_at=None,
        finished_at=None,
        journal_submission=0,
        journal_cursor=None,
        journal_n=0,
        last_seq=0,
        updated_at=now,
        row_version=0,
    )


def first_transition(run: RunRow) -> TransitionRow:
    """What the store's ``transitions`` say of a run that was made just now."""
    return TransitionRow(run.id, run.last_seq, None, run.status.value, run.created_at, None, None)
