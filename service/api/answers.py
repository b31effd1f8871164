"""Rows as the answers that clients read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from fastapi import Response
from pydantic import BaseModel

from everstep.wire import Best, Event, ForkedFrom, LatestCheckpoint, Links, Reason, ReasonCode, Run, RunStatus, Transition
from service.db.rows import EventRow, RunRow, TransitionRow
from service.projections.goodput import TimeLedger
from service.projections.protection import protection

_STATUSES: Final = {status.value: status for status in RunStatus}


def to_time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def maybe_time(seconds: float | None) -> datetime | None:
    return None if seconds is None else to_time(seconds)


def event_answer(row: EventRow) -> Event:
    return Event(seq=row.seq, at=to_time(row.at), kind=row.kind, submission=row.submission, attempt=row.attempt, data=row.data)


def as_json(answer: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer written once: what a handler returns as a model is made into dicts first, which costs more than the rest of it."""
    return Response(answer.model_dump_json(by_alias=True), status, headers, media_type="application/json")


def run_answer(
    run: RunRow, transitions: Sequence[TransitionRow], dashboard_url: str | None, now: float, public_url: str | None = None
) -> Run:
    """The run as it is at ``now`` (unix seconds).

    Args:
        run: Its row.
        transitions: Changes of its status, oldest first.
        dashboard_url: Base URL of the Ray dashboard; None while it is not known.
        now: Unix seconds.
        public_url: Base URL of this service for browsers, without a trailing slash; None links to no page.
    """
    latest = run.latest_checkpoint
    return Run(
        id=run.id,
        name=run.name,
        project=run.project,
        status=run.status,
        reason=run.reason,
        priority=run.priority,
        tags=run.tags,
        attempt=run.attempt,
        submission=run.submission,
        created_at=to_time(run.created_at),
        started_at=maybe_time(run.started_at),
        finished_at=maybe_time(run.finished_at),
        epoch=run.epoch,
        step=run.step,
        total_steps=run.total_steps,
        world_size=run.world_size,
        metrics=run.metrics,
        best=None if run.best is None else Best.model_validate(run.best),
        latest_checkpoint=None
        if latest is None
        else LatestCheckpoint(step=latest["step"], committed_at=to_time(latest["committed_at"]), size_bytes=latest["size_bytes"]),
        restarts=run.restarts,
        steps_lost=run.steps_lost,
        protection=protection(run),
        goodput=TimeLedger.load(run.time_ledger).share(_end(run, now)),
        links=_links(run, dashboard_url, public_url),
        transitions=tuple(_transition(row) for row in transitions),
        guarantee=run.guarantee,
        forked_from=ForkedFrom.model_validate(run.spec["resume_from"]) if run.spec.get("resume_from") else None,
    )


def _end(run: RunRow, now: float) -> float:
    return now if run.finished_at is None else run.finished_at


def _links(run: RunRow, dashboard_url: str | None, public_url: str | None) -> Links:
    job = f"{dashboard_url}/#/jobs/{run.ray_job_id}" if dashboard_url and run.ray_job_id else None
    page = f"{public_url}/runs/{run.id}" if public_url else None
    return Links(ray_dashboard=dashboard_url, ray_job=job, dashboard=page)


def _transition(row: TransitionRow) -> Transition:
    reason = None
    if row.reason_code is not None:
        reason = Reason(code=ReasonCode(row.reason_code), message=row.reason_message or "")
    return Transition(
        from_status=None if row.from_status is None else _STATUSES[row.from_status],
        to_status=_STATUSES[row.to_status],
        at=to_time(row.at),
        reason=reason,
    )
