"""Routes of a run's drills: request one, list them with their reports."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Path, Request

from everstep.wire import Page
from everstep.wire.drills import Drill, DrillRequest
from everstep.wire.events import EventKind
from service.api import rank_orders
from service.api.auth import Caller, VisibleRun
from service.api.context import ApiContext, Context
from service.api.openapi import DRILL_BODY, problem_answers
from service.api.problems import ProblemError, not_found
from service.api.spec_body import read_model
from service.db import orders
from service.db.ids import new_drill_id
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from service.projections import drills
from storage.run_control import DrillOrder
from storage.run_dir import RunDir

router: Final = APIRouter(prefix="/v1/runs/{run_id}/drills", tags=["drills"])


async def drillable_run(run: VisibleRun, caller: Caller, context: Context) -> RunRow:
    """Return the run in the path, for a drill. Raises 403 for other callers than admins, and if
    drills are disabled."""
    caller.require("admin")
    if not context.drills_enabled:
        detail = "drills are disabled; start the service with --drills or EVERSTEP_DRILLS=1"
        raise ProblemError(403, "drills_disabled", detail)
    return run


DrillableRun = Annotated[RunRow, Depends(drillable_run)]


@router.post(
    "",
    status_code=202,
    summary="Inject a failure into a run",
    responses=problem_answers(400, 403, 404, 409, 413, 415, 422),
    openapi_extra=DRILL_BODY,
)
async def request_drill(
    request: Request, run: DrillableRun, context: Context, caller: Caller
) -> Drill:
    """Only for runs that are RUNNING, one drill at a time. The run's driver takes it up within a
    second; the list shows the result."""
    wanted = await read_model(DrillRequest, request)
    now = context.clock()
    data = {
        "id": new_drill_id(now),
        "kind": wanted.kind.value,
        "rank": wanted.rank,
        "by": caller.name,
    }
    event = await rank_orders.record(context, run, orders.DRILL, now, data)
    order = DrillOrder(event.data["id"], wanted.kind, wanted.rank, run.attempt)
    await context.storage_call(RunDir(context.storage, run.id).order_drill, run.submission, order)
    return drills.drill(drills.Story(event), ())


@router.get("", summary="Drills of a run", responses=problem_answers(404))
async def list_drills(run: VisibleRun, context: Context) -> Page[Drill]:
    """Every drill with its report, oldest first."""
    return Page(
        items=tuple([await _answer(context, run, story) for story in await _stories(context, run)]),
        next_cursor=None,
    )


@router.get("/{drill_id}", summary="One drill", responses=problem_answers(404))
async def get_drill(
    run: VisibleRun,
    context: Context,
    drill_id: Annotated[str, Path(max_length=32, description="Id of the drill: `drill_…`.")],
) -> Drill:
    for story in await _stories(context, run):
        if story.id == drill_id:
            return await _answer(context, run, story)
    raise not_found(f"run {run.id} has no drill {drill_id[:40]!r}")


async def _stories(context: ApiContext, run: RunRow) -> list[drills.Story]:
    return drills.stories(
        await context.database_call(context.events.of_kinds, run.id, drills.KINDS)
    )


async def _answer(context: ApiContext, run: RunRow, story: drills.Story) -> Drill:
    metrics: list[EventRow] = []
    if story.recovered is not None:
        after = max(0, story.requested.seq - drills.METRICS_BEFORE)
        metrics = await context.database_call(
            context.events.after, run.id, after, drills.METRICS_MOST, frozenset({EventKind.METRICS})
        )
    return drills.drill(story, metrics)
