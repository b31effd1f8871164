"""Turn rows into the responses that clients read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Final, get_type_hints

from fastapi import Response
from pydantic import BaseModel
from pydantic_core import to_json

from everstep.wire import Event, Run, format_time
from service.model.prices import NO_PRICES, Prices
from service.model.rows import EventRow, TransitionRow
from service.model.run_rows import ListedRun, RunRow, RunSummary
from service.projections.goodput import TimeLedger
from service.projections.progress import progress_of, usage_of
from service.projections.protection import ENDED, protection

JsonObject = dict[str, Any]
"""A JSON object of texts, numbers, lists and objects."""
_ENDED_JSON: Final = ENDED.model_dump()
_HINTS: Final = get_type_hints(RunSummary)
_SAME: Final = tuple(
    name for name, field in Run.model_fields.items() if _HINTS.get(name) == field.annotation
)
"""Fields of the response with the same name and type as the row's."""
_same_fields: Final = attrgetter(*_SAME)


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
    """Return a response with this body. FastAPI would first turn a model into dicts, which takes
    longer than the rest."""
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
    prices: Prices = NO_PRICES,
) -> Run:
    """Return the result of ``run_json`` as a model."""
    return Run.model_validate(run_json(run, transitions, dashboard_url, now, public_url, prices))


def run_json(
    run: RunRow | ListedRun,
    transitions: Sequence[TransitionRow],
    dashboard_url: str | None,
    now: float,
    public_url: str | None = None,
    prices: Prices = NO_PRICES,
) -> JsonObject:
    """Return the run as of ``now``, as the JSON of ``Run``.

    Building models for a page of runs would take longer than reading the runs.

    Args:
        run: its row. Fields of ``Run`` that are not set here are the row's fields of the same name.
        transitions: its transitions, oldest first.
        dashboard_url: base URL of the Ray dashboard; None until it is known.
        now: unix seconds.
        public_url: base URL of this service for browsers, without a trailing slash, through which
            Ray's dashboard is reached, too; None for no links to pages.
        prices: what an hour of a resource costs.
    """
    latest, best, origin = run.latest_checkpoint, run.best, run.resume_from
    protected = protection(run)
    ray_url = f"{public_url}/ray" if public_url and dashboard_url else dashboard_url
    answer = dict(zip(_SAME, _same_fields(run), strict=True)) | {
        "reason": _reason(run.reason_code, run.reason_message),
        "created_at": _time(run.created_at),
        "started_at": None if run.started_at is None else _time(run.started_at),
        "finished_at": None if run.finished_at is None else _time(run.finished_at),
        "best": best and {"metric": best["metric"], "value": best["value"], "step": best["step"]},
        "latest_checkpoint": latest
        and {
            "step": latest["step"],
            "committed_at": _time(latest["committed_at"]),
            "size_bytes": latest["size_bytes"],
        },
        "protection": _ENDED_JSON if protected is ENDED else protected.model_dump(),
        "goodput": TimeLedger.load(run.time_ledger).share(
            now if run.finished_at is None else run.finished_at
        ),
        "links": {
            "ray_dashboard": ray_url,
            "ray_job": f"{ray_url}/#/jobs/{run.ray_job_id}" if ray_url and run.ray_job_id else None,
            "dashboard": f"{public_url}/runs/{run.id}" if public_url else None,
        },
        "transitions": [
            {
                "from": row.from_status,
                "to": row.to_status,
                "at": _time(row.at),
                "reason": _reason(row.reason_code, row.reason_message),
            }
            for row in transitions
        ],
        "forked_from": origin and origin.model_dump(),
        "exactness": run.exactness,
        "audit_fraction": run.audit_fraction,
        "replay_of": run.replay_of,
        "progress": progress_of(run, now),
        "usage": usage_of(run, now, prices),
    }
    return {name: answer[name] for name in Run.model_fields}


def _time(seconds: float) -> str:
    return format_time(to_time(seconds))


def _reason(code: str | None, message: str | None) -> JsonObject | None:
    return None if code is None else {"code": code, "message": message or ""}
