"""The facts in a run's row."""

from __future__ import annotations

from service.model.run_rows import RunRow
from service.reconciler.facts import NOTHING_DELIVERED, Delivered, JobFact, RunFacts, TailFact
from storage.run_names import CheckpointName


def facts_of(
    row: RunRow,
    delivered: Delivered = NOTHING_DELIVERED,
    job: JobFact = JobFact.UNKNOWN,
    tail: TailFact = TailFact.BEHIND,
) -> RunFacts:
    """Return the facts of a row, with what is known about its job and its journal."""
    scaling, deadline_s = row.stored_spec.scaling, row.stored_spec.recovery.deadline_s
    shrunk = row.shrunk or {}
    return RunFacts(
        id=row.id,
        status=row.status,
        created_at=row.created_at,
        project=row.project,
        priority=row.priority,
        reason=row.reason,
        stop=row.stop_requested,
        stop_at=row.stop_requested_at,
        stop_delivered=row.stop_requested is not None
        and (row.id, row.submission, row.stop_requested) in delivered.stops,
        submission=row.submission,
        job_recorded=row.ray_job_id is not None,
        submitted_at=row.submitted_at,
        fruitless=row.submission - _last_fruitful(row),
        job=job,
        tail=tail,
        deadline_at=None if deadline_s is None else row.created_at + deadline_s,
        steps_done=row.total_steps is not None and row.step >= row.total_steps,
        min_workers=scaling.min_workers,
        max_workers=scaling.max_workers,
        workers_limit=row.workers_limit,
        shrunk_to=shrunk.get("to"),
        shrunk_by=shrunk.get("by"),
        shrunk_at=shrunk.get("at"),
        shrink_delivered=row.shrunk is not None
        and (row.id, row.submission, row.shrunk["to"]) in delivered.limits,
        world_size=row.world_size,
        node_ids=tuple(worker["node_id"] for worker in row.workers),
        worker=scaling.resources_per_worker,
        use_gpu=scaling.use_gpu,
        placement_strategy=scaling.placement_strategy,
        accelerator_type=scaling.accelerator_type,
    )


def _last_fruitful(row: RunRow) -> int:
    """Return the newest submission that committed a checkpoint, or 0."""
    name = CheckpointName.parse(row.latest_checkpoint["name"]) if row.latest_checkpoint else None
    return name.submission if name else 0
