"""Answers about runs, and lists of them page by page."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Final, TypeVar, get_type_hints

from fastapi import Query, Response
from pydantic import BaseModel
from pydantic_core import to_json

from everstep.spec.plain_text import is_sayable
from everstep.wire import Answer, Event, Run, format_time
from service.api.problems import ApiProblem, invalid_request
from service.cluster.cluster_view import ClusterView
from service.db import run_lookup
from service.db.ids import RUN_ID_PATTERN
from service.db.run_lookup import Place
from service.model.operator_rules import NO_PRICES, Prices
from service.model.rows import EventRow, TransitionRow, maybe_time, to_time
from service.model.run_rows import ListedRun, RunHead, RunRow, RunSummary
from service.projections.goodput import TimeLedger
from service.projections.protection import ENDED, progress_of, protection, usage_of

A = TypeVar("A", bound=Answer)
JsonObject = dict[str, Any]
"""A JSON object of texts, numbers, lists and objects."""
_ENDED_JSON: Final = ENDED.model_dump()
_HINTS: Final = get_type_hints(RunSummary)
_SAME: Final = tuple(
    name for name, field in Run.model_fields.items() if _HINTS.get(name) == field.annotation
)
"""Fields of the response with the same name and type as the row's."""
_same_fields: Final = attrgetter(*_SAME)


def answer_of(kind: type[A], row: object, **given: Any) -> A:
    """Return an answer with what is given, and the row's values in all other fields. In a row, the
    times ``at`` and ``…_at`` are in unix seconds."""
    for name in kind.model_fields.keys() - given.keys():
        value = getattr(row, name)
        given[name] = maybe_time(value) if name.rpartition("_")[2] == "at" else value
    return kind(**given)


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


@dataclass(frozen=True)
class ServiceLinks:
    """Where browsers find this service and Ray's dashboard."""

    cluster: ClusterView
    public_url: str | None
    """Base URL of this service, without a trailing slash; None if unknown."""
    relays_ray: bool
    """Whether this service passes on Ray's dashboard."""

    @property
    def ray_url(self) -> str | None:
        """Return where a person opens Ray's dashboard: through this service, if it passes it on.
        None until the cluster's address is known."""
        url = self.cluster.dashboard_url
        return f"{self.public_url}/ray" if url and self.public_url and self.relays_ray else url


def run_json(
    run: RunRow | ListedRun,
    transitions: Sequence[TransitionRow],
    links: ServiceLinks,
    now: float,
    prices: Prices = NO_PRICES,
) -> JsonObject:
    """Return the run as of ``now``, as the JSON of ``Run``.

    Building models for a page of runs would take longer than reading the runs.

    Args:
        run: its row. Fields of ``Run`` that are not set here are the row's fields of the same name.
        transitions: its transitions, oldest first.
        links: where pages are.
        now: unix seconds.
        prices: what an hour of a resource costs.
    """
    latest, best, origin = run.latest_checkpoint, run.best, run.resume_from
    protected, ray_url = protection(run), links.ray_url
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
            "dashboard": f"{links.public_url}/runs/{run.id}" if links.public_url else None,
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


# ---------------------------------------------------------------- paging

# Cursors of lists: opaque to clients, validated when they come back.

T = TypeVar("T")
Key = tuple[float | str | None, ...]

MOST_CURSOR_CHARS: Final = 1200
_KINDS: Final = ((float, type(None)), (type(None), str), (type(None), type(None)))
Limit = Annotated[int, Query(ge=1, le=500, description="Maximum items per page.")]
Cursor = Annotated[
    str | None,
    Query(
        max_length=MOST_CURSOR_CHARS,
        description="`next_cursor` of the previous page; omit it for the first.",
    ),
]


def run_cursor(run: RunHead) -> str:
    """Return the cursor after this run in a list of runs, newest first."""
    return encode_run_cursor(run.created_at, run.id)


def encode_run_cursor(created_at: float, run_id: str) -> str:
    """Return the cursor after a run with this creation time (unix seconds) and id."""
    return encode_place((created_at, run_id))


def parse_run_cursor(cursor: str | None) -> Place | None:
    """Return (created_at, id) of the last run of the previous page. Raises 422 for a cursor that
    ``run_cursor`` did not make."""
    if cursor is None:
        return None
    return parse_place(cursor, RUN_ID_PATTERN)


def parse_place(cursor: str, pattern: re.Pattern[str]) -> Place:
    match _decode(cursor):
        case [float(created_at), str(item_id)] if math.isfinite(created_at) and pattern.fullmatch(
            item_id
        ):
            return created_at, item_id
    raise _not_ours()


def order_cursor(order: run_lookup.RunOrder, place: run_lookup.OrderPlace | None) -> str | None:
    """Return the cursor after a run in a list in this order; None after the last."""
    return None if place is None else encode_place((_mark_of(order), *place))


def parse_order_cursor(
    order: run_lookup.RunOrder, cursor: str | None
) -> run_lookup.OrderPlace | None:
    """Return the place in a cursor that ``order_cursor`` made for the same order. Raises 422 for
    another."""
    if cursor is None:
        return None
    match _decode(cursor):
        case [str(key), float(now), (0 | 1 | 2) as kind, number, text, float(at), str(run_id)] if (
            key == _mark_of(order)
            and (type(number), type(text)) == _KINDS[kind]
            and math.isfinite(now)
            and math.isfinite(at)
            and RUN_ID_PATTERN.fullmatch(run_id)
            and is_sayable(text or "")
        ):
            return run_lookup.OrderPlace(now, kind, number, text, at, run_id)
    raise _not_ours()


def _mark_of(order: run_lookup.RunOrder) -> str:
    return hashlib.sha256(str(order).encode()).hexdigest()[:12]


def page_of(
    items: Sequence[T], key: Callable[[T], Key], cursor: str | None, limit: int
) -> tuple[Sequence[T], str | None]:
    """Return a page of a short list in the order of ``key``, which is unique, and the cursor after
    it.

    The cursor names the last item, not a count, so deletions in between skip nothing. Raises 422
    for a cursor of another list.
    """
    ordered = sorted(items, key=key)
    if cursor is not None:
        place = _decode(cursor)
        like = [type(part) for part in key(ordered[0])] if ordered else None
        if not isinstance(place, list) or (
            like is not None and [type(part) for part in place] != like
        ):
            raise _not_ours()
        ordered = [item for item in ordered if key(item) > tuple(place)]
    return ordered[:limit], encode_place(key(ordered[limit - 1])) if len(ordered) > limit else None


def encode_place(place: Key) -> str:
    return (
        base64.urlsafe_b64encode(json.dumps(place, ensure_ascii=False).encode())
        .decode()
        .rstrip("=")
    )


def _decode(cursor: str) -> Any:
    """Return the list that ``encode_place`` was given; None for anything else."""
    try:
        return json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, binascii.Error, RecursionError):
        return None


def _not_ours() -> ApiProblem:
    return invalid_request(
        "cursor", msg="is not a cursor of this list; use next_cursor of the previous page"
    )


def position(cursor: str | None, after: int) -> int:
    """Return where to continue in a numbered list: ``cursor`` if given, else ``after``. Raises
    422."""
    if cursor is None:
        return after
    if cursor.isascii() and cursor.isdigit() and len(cursor) <= 18:
        return int(cursor)
    raise _not_ours()
