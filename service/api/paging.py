"""Cursors of lists: opaque to clients, checked when they come back."""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import Annotated

from fastapi import Query

from service.db.ids import RUN_ID_PATTERN
from service.db.rows import RunHead
from service.db.run_lookup import Place
from service.problems import invalid_request

Limit = Annotated[int, Query(ge=1, le=500, description="Most items of one page.")]
Cursor = Annotated[str | None, Query(max_length=200, description="`next_cursor` of the page before; leave it out for the first.")]


def run_cursor(run: RunHead) -> str:
    """Cursor behind this run in a list of runs, newest first."""
    return encode_run_cursor(run.created_at, run.id)


def encode_run_cursor(created_at: float, run_id: str) -> str:
    """Cursor behind a run that was created at that moment, in unix seconds."""
    return base64.urlsafe_b64encode(json.dumps([created_at, run_id]).encode()).decode().rstrip("=")


def parse_run_cursor(cursor: str | None) -> Place | None:
    """(created_at, id) of the last run of the page before. Raises 422 for what was not made by ``run_cursor``."""
    if cursor is None:
        return None
    try:
        created_at, run_id = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if isinstance(created_at, float) and math.isfinite(created_at) and RUN_ID_PATTERN.fullmatch(run_id):
            return created_at, run_id
    except (ValueError, TypeError, binascii.Error, RecursionError):
        pass
    raise invalid_request("cursor", msg="is not a cursor of this list; take next_cursor of the page before")


def position(cursor: str | None, after: int) -> int:
    """Where to go on in a list that counts its items: ``cursor`` where given, else ``after``. Raises 422."""
    if cursor is None:
        return after
    if cursor.isascii() and cursor.isdigit() and len(cursor) <= 18:
        return int(cursor)
    raise invalid_request("cursor", msg="is not a cursor of this list; take next_cursor of the page before")
