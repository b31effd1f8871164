"""Rows as the answers that clients read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from fastapi import Response
from pydantic import BaseModel
from pydantic_core import to_json

from everstep.wire import Event, Run, format_time
from service.model.rows import EventRow, ListedRun, RunRow, TransitionRow
from service.projections.goodput import TimeLedger
from service.projections.protection import ENDED, protection

JsonObject = dict[str, Any]
"""What JSON says of it: texts, numbers, lists and objects only."""
_ENDED_JSON: Final = ENDED.model_dump()


def to_time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def maybe_time(seconds: float | None) -> datetime | None:
    return None if seconds is None else to_time(seconds)


def event_answer(row: EventRow) -> Event:
    return Event(
        seq=row.seq,
        at=to_time(row.at),
        kind=row.kind,
        submission=row.submission,
        attempt=row.attempt,
        data=row.data,
    )


def as_json(
    answer: BaseModel | JsonObject, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer written once: what a handler returns as a model is made into dicts first, which
    costs more than the rest of it."""
    body = (
        answer.model_dump_json(by_alias=True) if isinstance(answer, BaseModel) else to_json(answer)
    )
    return Response(body, status, headers, media_type="application/json")


def run_answer(
    run: RunRow | ListedRun,
    transitions: Sequence[TransitionRow],
    dashboard_url: str | None,
    now: float,
    public_url: str | None = None,
) -> Run:
    """What ``run_json`` says, as a model."""
    return Run.model_validate(run_json(run, transitions, dashboard_url, now, public_url))


def run_json(
    run: RunRow | ListedRun,
    transitions: Sequence[TransitionRow],
    dashboard_url: str | None,
    now: float,
    public_url: str | None = None,
) -> JsonObject:
    """The run as it is at ``now``, as JSON says it: models of a page's runs would cost more than to
    find them.

    Args:
        run: Its row.
        transitions: Changes of its status, oldest first.
        dashboard_url: Base URL of the Ray dashboard; None while it is not known.
        now: Unix seconds.
        public_url: Base URL of this service for browsers, without a trailing slash; None links to
            no page.
    """
    latest, best, origin, protected = (
        run.latest_checkpoint,
        run.best,
        run.resume_from,
        protection(run),
    )
    return {
        "id": run.id,
        "name": run.name,
        "project": run.project,
        "status": run.status,
        "reason": _reason(run.reason_code, run.reason_message),
        "priority": run.priority,
        "tags": run.tags,
        "attempt": run.attempt,
        "submission": run.submission,
        "created_at": _told(run.created_at),
        "started_at": None if run.started_at is None else _told(run.started_at),
        "finished_at": None if run.finished_at is None else _told(run.finished_at),
        "epoch": run.epoch,
        "step": run.step,
        "total_steps": run.total_steps,
        "world_size": run.world_size,
        "metrics": run.metrics,
        "best": best and {"metric": best["metric"], "value": best["value"], "step": best["step"]},
        "latest_checkpoint": latest
        and {
            "step": latest["step"],
            "committed_at": _told(latest["committed_at"]),
            "size_bytes": latest["size_bytes"],
        },
        "restarts": run.restarts,
        "steps_lost": run.steps_lost,
        "protection": _ENDED_JSON if protected is ENDED else protected.model_dump(),
        "goodput": TimeLedger.load(run.time_ledger).share(
            now if run.finished_at is None else run.finished_at
        ),
        "links": {
            "ray_dashboard": dashboard_url,
            "ray_job": f"{dashboard_url}/#/jobs/{run.ray_job_id}"
            if dashboard_url and run.ray_job_id
            else None,
            "dashboard": f"{public_url}/runs/{run.id}" if public_url else None,
        },
        "transitions": [
            {
                "from": row.from_status,
                "to": row.to_status,
                "at": _told(row.at),
                "reason": _reason(row.reason_code, row.reason_message),
            }
            for row in transitions
        ],
        "forked_from": origin and {"run_id": origin["run_id"], "step": origin["step"]},
        "guarantee": run.guarantee,
    }


def _told(seconds: float) -> str:
    return format_time(to_time(seconds))


def _reason(code: str | None, message: str | None) -> JsonObject | None:
    return None if code is None else {"code": code, "message": message or ""}
