"""Orders to one of a run's ranks, as drills and profiles are: checked against the ranks that there
are, and recorded."""

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
    """Record an order with its ``id`` and ``rank`` in ``data``. Raises TransitionConflict as
    ``orders.record``; 422 for no rank."""
    if run.world_size is None:
        raise orders.not_training(run, order)
    if data["rank"] >= run.world_size:
        raise invalid_request(
            "rank", msg=f"run {run.id} has ranks 0 to {run.world_size - 1} now, not {data['rank']}"
        )
    return await context.database_call(orders.record, context.database, run, order, data, now)
