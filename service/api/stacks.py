"""Routes for what a run's ranks do now: ask for their stacks, and read them."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from everstep.wire import Page
from everstep.wire.stacks import StackReport
from service.api.auth import ControlledRun, VisibleRun
from service.api.context import ApiContext, Context
from service.api.openapi import problem_answers
from service.db import orders
from service.db.ids import new_stacks_id
from service.model.run_rows import RunRow
from service.projections.stacks import KINDS, stack_reports
from storage.run_control import StackOrder
from storage.run_dir import RunDir

MOST_REPORTS: Final = 20

router: Final = APIRouter(prefix="/v1/runs/{run_id}/stacks", tags=["stacks"])


@router.post(
    "",
    status_code=202,
    summary="Ask what the ranks do now",
    responses=problem_answers(400, 403, 404, 409),
)
async def request_stacks(run: ControlledRun, context: Context) -> StackReport:
    """Only for runs that are RUNNING. Their ranks are not interrupted. The list has the stacks a
    moment later."""
    return await order_stacks(run, context)


async def order_stacks(run: RunRow, context: ApiContext) -> StackReport:
    """Request the stacks of a run's ranks. Raises 409 if it is not training."""
    now = context.clock()
    data = {"id": new_stacks_id(now)}
    event = await context.database_call(
        orders.record, context.database, run, orders.STACKS, data, now
    )
    order = StackOrder(event.data["id"], run.attempt)
    await context.storage_call(RunDir(context.storage, run.id).order_stacks, run.submission, order)
    return stack_reports([event])[0]


@router.get("", summary="What the ranks did", responses=problem_answers(404))
async def list_stacks(run: VisibleRun, context: Context) -> Page[StackReport]:
    """The newest reports, newest first. The service adds one by itself when nothing has moved for a
    minute."""
    return Page(items=tuple(await newest_stacks(run, context)), next_cursor=None)


async def newest_stacks(run: RunRow, context: ApiContext) -> list[StackReport]:
    """Return the newest reports on what a run's ranks did, newest first."""
    found = stack_reports(await context.database_call(context.events.of_kinds, run.id, KINDS))
    return found[: -MOST_REPORTS - 1 : -1]
