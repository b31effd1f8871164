"""Routes of a run's history: events, attempts, failures, goodput, samples."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from everstep.wire import Attempt, Event, Failure, Goodput, Page, Samples, StragglerReport
from everstep.wire.events import EventKind
from service.api import sse
from service.api.answers import event_answer
from service.api.auth import Caller, VisibleRun
from service.api.context import Context
from service.api.last_lines import with_last_lines
from service.api.openapi import STREAM, problem_answers
from service.api.paging import Cursor, position
from service.projections import attempts, failures, samples, stragglers
from service.projections.goodput import TimeLedger

router: Final = APIRouter(prefix="/v1/runs/{run_id}", tags=["history"])

EventLimit = Annotated[
    int, Query(ge=1, le=1000, description="Maximum events per page; streams have no limit.")
]
After = Annotated[int, Query(ge=0, le=2**53, description="Only events after this `seq`.")]


@router.get(
    "/events",
    summary="Events of a run, as pages or as a stream",
    response_model=Page[Event],
    responses={200: STREAM, **problem_answers(404, 422)},
)
async def get_events(
    request: Request,
    run: VisibleRun,
    context: Context,
    caller: Caller,
    after: After = 0,
    limit: EventLimit = 200,
    cursor: Cursor = None,
    last_event_id: sse.LastEventId = None,
) -> Page[Event] | Response:
    """JSON pages, oldest first; `next_cursor` is the last `seq` if there are more. A page may end
    before `limit`: the data of its events is limited to 8 MiB together, unless it has a single
    event.

    With `Accept: text/event-stream` a stream of server-sent events: `id` is the `seq`, `data` the
    event. It follows the run, honours `Last-Event-ID`, and ends after the event that ends the run.
    """
    if sse.wanted(request):
        return sse.response(
            context, caller, context.feed.follow(run.id, sse.resume_after(last_event_id, after))
        )
    page = await context.database_call(context.events.page, run.id, position(cursor, after), limit)
    items = tuple(event_answer(row) for row in page.rows)
    return Page(items=items, next_cursor=str(items[-1].seq) if page.more else None)


@router.get("/attempts", summary="Worker groups of a run", responses=problem_answers(404))
async def get_attempts(run: VisibleRun, context: Context) -> Page[Attempt]:
    """Every attempt with its workers, oldest first."""
    events = await context.database_call(context.events.of_kinds, run.id, attempts.KINDS)
    return Page(items=tuple(attempts.attempts(events)), next_cursor=None)


@router.get("/failures", summary="Failures of a run", responses=problem_answers(404, 422))
async def get_failures(
    run: VisibleRun,
    context: Context,
    lines: Annotated[
        int,
        Query(ge=0, le=200, description="Maximum last log lines of the first failing rank."),
    ] = 10,
) -> Page[Failure]:
    """Every failure with its verdict, evidence and action, oldest first.

    `last_lines` are the last log lines of the first failing rank, for the newest 20 failures, if
    the storage responds.
    """
    events = await context.database_call(context.events.of_kinds, run.id, failures.KINDS)
    return Page(
        items=await with_last_lines(context, run.id, failures.failures(events), lines),
        next_cursor=None,
    )


@router.get("/stragglers", summary="Stragglers of a run", responses=problem_answers(404))
async def get_stragglers(run: VisibleRun, context: Context) -> StragglerReport:
    """Each rank's latest step time and wait for the others, by rank and by node; and every rank
    that was a straggler for long enough to matter."""
    events = await context.database_call(context.events.of_kinds, run.id, stragglers.KINDS)
    times = await context.database_call(context.events.newest, run.id, EventKind.RANK_TIMES)
    use = await context.database_call(
        context.events.newest, run.id, EventKind.GPU_USE, stragglers.GPU_EVENTS
    )
    return stragglers.stragglers(events, times[0] if times else None, use)


@router.get("/goodput", summary="Where a run's time went", responses=problem_answers(404))
async def get_goodput(run: VisibleRun, context: Context) -> Goodput:
    """Every second since the run's creation is in exactly one bucket; `goodput` is the productive
    share."""
    return TimeLedger.load(run.time_ledger).close(
        context.clock() if run.finished_at is None else run.finished_at
    )


@router.get("/samples", summary="Samples that a run used", responses=problem_answers(404))
async def get_samples(run: VisibleRun, context: Context) -> Samples:
    """For each finished epoch, over the committed lineage: how many samples were used once, more
    than once or never."""
    events = await context.database_call(context.events.of_kinds, run.id, samples.KINDS)
    return samples.samples(events)
