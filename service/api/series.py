"""Routes of a run's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Query

from everstep.wire import MetricSeries
from everstep.wire.metric_names import system_figure
from service.api.auth import VisibleRun
from service.api.context import ApiContext, Context
from service.api.openapi import problem_answers
from service.projections.downsampling import MIN_POINTS, Point

router: Final = APIRouter(prefix="/v1/runs/{run_id}", tags=["history"])


@router.get("/metrics", summary="Series of metrics", responses=problem_answers(404, 422))
async def get_metrics(
    run: VisibleRun,
    context: Context,
    names: Annotated[
        str | None,
        Query(
            max_length=4096,
            description=(
                "Names separated by commas; default all but those of hosts and GPUs, such as "
                "`system.cpu_cores.rank0`."
            ),
            examples=["loss,val_accuracy"],
        ),
    ] = None,
    max_points: Annotated[
        int, Query(ge=MIN_POINTS, le=10_000, description="Maximum points per series.")
    ] = 500,
) -> MetricSeries:
    """`[step, unix seconds, value]` for each name. Longer series are down-sampled with extremes
    kept; a value that was not finite is null. An unknown name has no points. The first number of
    a series `system.…` is not a step, but whole seconds since the run was created."""
    if names is None:
        known = await context.database_call(context.series.names, run.id)
        wanted = [name for name in known if system_figure(name) is None]
    else:
        wanted = [name for name in dict.fromkeys(names.split(",")) if name]
    return MetricSeries(series=await thinned(context, run.id, wanted, max_points))


async def thinned(
    context: ApiContext, run_id: str, names: Sequence[str], max_points: int
) -> dict[str, list[Point]]:
    """Return these series, down-sampled. Each is read in its own thread, so that several cores
    share a long history."""
    found = await asyncio.gather(
        *(context.database_call(context.series.points, run_id, name, max_points) for name in names)
    )
    return {
        name: [(point.step, point.at, point.value) for point in points]
        for name, points in zip(names, found, strict=True)
    }
