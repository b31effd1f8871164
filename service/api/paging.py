"""Cursors of lists: opaque to clients, validated when they come back."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeVar

from fastapi import Query

from everstep.spec.plain_text import is_sayable
from service.api.problems import ProblemError, invalid_request
from service.db import run_order
from service.db.ids import RUN_ID_PATTERN, SWEEP_ID_PATTERN
from service.db.run_lookup import Place
from service.model.run_rows import RunHead

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
    return _encode((created_at, run_id))


def parse_run_cursor(cursor: str | None) -> Place | None:
    """Return (created_at, id) of the last run of the previous page. Raises 422 for a cursor that
    ``run_cursor`` did not make."""
    if cursor is None:
        return None
    return _parse_place(cursor, RUN_ID_PATTERN)


def sweep_cursor(created_at: float, sweep_id: str) -> str:
    """Return the cursor after a sweep in a list of sweeps, newest first."""
    return _encode((created_at, sweep_id))


def parse_sweep_cursor(cursor: str | None) -> Place | None:
    """Return (created_at, id) of the last sweep of the previous page. Raises 422 for a cursor that
    ``sweep_cursor`` did not make."""
    return None if cursor is None else _parse_place(cursor, SWEEP_ID_PATTERN)


def _parse_place(cursor: str, pattern: re.Pattern[str]) -> Place:
    match _decode(cursor):
        case [float(created_at), str(item_id)] if math.isfinite(created_at) and pattern.fullmatch(
            item_id
        ):
            return created_at, item_id
    raise _not_ours()


def order_cursor(order: run_order.RunOrder, place: run_order.Place | None) -> str | None:
    """Return the cursor after a run in a list in this order; None after the last."""
    return None if place is None else _encode((_mark_of(order), *place))


def parse_order_cursor(order: run_order.RunOrder, cursor: str | None) -> run_order.Place | None:
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
            return run_order.Place(now, kind, number, text, at, run_id)
    raise _not_ours()


def _mark_of(order: run_order.RunOrder) -> str:
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
    return ordered[:limit], _encode(key(ordered[limit - 1])) if len(ordered) > limit else None


def _encode(place: Key) -> str:
    return (
        base64.urlsafe_b64encode(json.dumps(place, ensure_ascii=False).encode())
        .decode()
        .rstrip("=")
    )


def _decode(cursor: str) -> Any:
    """Return the list that ``_encode`` was given; None for anything else."""
    try:
        return json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, binascii.Error, RecursionError):
        return None


def _not_ours() -> ProblemError:
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
