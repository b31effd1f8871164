"""Requests to a rank (drills, profiles): check the rank and record the request."""

from __future__ import annotations

from typing import Any

from service.api.context import ApiContext
from service.api.problems import invalid_request
from service.db import orders
from service.model.rows import EventRow
from service.model.run_rows import RunRow


async def record(
    context: ApiContext, run: RunRow, order: orders.Order, now: float, data: dict[str, Any]
) -> EventRow:
    """Record a request with its ``id`` and ``rank`` in ``data``. Raises TransitionConflict as
    ``orders.record``; 422 for an unknown rank."""
    if run.world_size is None:
        raise orders.not_training(run, order)
    if data["rank"] >= run.world_size:
        raise invalid_request(
            "rank", msg=f"run {run.id} has ranks 0 to {run.world_size - 1}, not {data['rank']}"
        )
    return await context.database_call(orders.record, context.database, run, order, data, now)
