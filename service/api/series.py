"""Routes of a run's metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Query, Response

from everstep.wire import MetricSeries
from everstep.wire.metric_names import system_figure
from service.api.auth import VisibleRun
from service.api.context import ApiContext, Context
from service.api.openapi import problem_answers
from service.projections.downsampling import MIN_POINTS, Point

_MOST_POINTS: Final = 200_000
"""Points of all series of one answer together."""

router: Final = APIRouter(prefix="/v1/runs/{run_id}", tags=["history"])


@router.get(
    "/metrics",
    summary="Series of metrics",
    response_model=MetricSeries,
    responses=problem_answers(404, 422),
)
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
        int,
        Query(
            ge=MIN_POINTS,
            le=10_000,
            description=(
                "Maximum points per series; fewer where all series would have more than 200,000."
            ),
        ),
    ] = 500,
) -> Response:
    """`[step, unix seconds, value]` for each name. Longer series are down-sampled with extremes
    kept; a value that was not finite is null. An unknown name has no points. The first number of
    a series `system.…` is not a step, but whole seconds since the run was created."""
    if names is None:
        known = await context.database_call(context.series.names, run.id)
        wanted = [name for name in known if system_figure(name) is None]
    else:
        wanted = [name for name in dict.fromkeys(names.split(",")) if name]
    points = max(MIN_POINTS, min(max_points, _MOST_POINTS // max(1, len(wanted))))
    encoded = await asyncio.gather(
        *(context.database_call(_encoded, context, run.id, name, points) for name in wanted)
    )
    return Response('{"series":{' + ",".join(encoded) + "}}", media_type="application/json")


def _encoded(context: ApiContext, run_id: str, name: str, max_points: int) -> str:
    """Return a name with its points as JSON. Of all series only these texts are in memory at once,
    and none is made in the event loop."""
    points = [
        (point.step, point.at, point.value)
        for point in context.series.points(run_id, name, max_points)
    ]
    return f"{json.dumps(name)}:{json.dumps(points, separators=(',', ':'))}"


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
