"""Series of a run's metrics."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query

from everstep.wire import MetricSeries
from service.api.context import ApiContext, Context
from service.api.openapi import problem_answers
from service.auth import VisibleRun
from service.projections.downsampling import MIN_POINTS, Point, downsample

router: Final = APIRouter(prefix="/v1/runs/{run_id}", tags=["history"])


@router.get("/metrics", summary="Series of metrics", responses=problem_answers(404, 422))
async def get_metrics(
    run: VisibleRun,
    context: Context,
    names: Annotated[
        str | None,
        Query(max_length=4096, description="Names separated by commas; leave it out for all.", examples=["loss,val_accuracy"]),
    ] = None,
    max_points: Annotated[int, Query(ge=MIN_POINTS, le=10_000, description="Most points of one series.")] = 500,
) -> MetricSeries:
    """`[step, unix seconds, value]` for each name. Longer series are thinned here so that extremes stay; a value that was not
    finite is null. A name that was never reported has no points."""
    wanted = None if names is None else [name for name in dict.fromkeys(names.split(",")) if name]
    return MetricSeries(series=await context.database_call(_series, context, run.id, wanted, max_points))


def _series(context: ApiContext, run_id: str, wanted: list[str] | None, max_points: int) -> dict[str, list[Point]]:
    names = context.events.metric_names(run_id) if wanted is None else wanted
    found: dict[str, list[Point]] = {}
    for name in names:
        points = [(point.step, point.at, point.value) for point in context.events.metric_points(run_id, name)]
        found[name] = downsample(points, max_points)
    return found
