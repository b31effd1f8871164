"""Routes of a run's history: events, attempts, failures, series of metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import Query, Request, Response

from everstep.wire import (
    Attempt,
    Event,
    Failure,
    Goodput,
    MetricSeries,
    Page,
    ProjectGoodput,
    Samples,
    StragglerReport,
)
from everstep.wire.drills import RunRehearsal
from everstep.wire.events import EventKind, system_figure
from service.api import streams
from service.api.answers import Cursor, Limit, event_answer, position
from service.api.auth import Caller, VisibleRun
from service.api.bodies import ApiRouter
from service.api.context import ApiContext, Context
from service.api.openapi import STREAM, problem_answers
from service.db.events import MIN_POINTS, Point
from service.model.rows import EventRow
from service.projections import attempts, protection
from service.projections.goodput import TimeLedger
from service.runs.logs import with_last_lines

router: Final = ApiRouter("/v1/runs/{run_id}", "history")

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
    last_event_id: streams.LastEventId = None,
) -> Page[Event] | Response:
    """JSON pages, oldest first; `next_cursor` is the last `seq` if there are more. A page may end
    before `limit`: the data of its events is limited to 8 MiB together, unless it has a single
    event.

    With `Accept: text/event-stream` a stream of server-sent events: `id` is the `seq`, `data` the
    event. It follows the run, honours `Last-Event-ID`, and ends after the event that ends the run.
    """
    if streams.wanted(request):
        frames = context.feed.follow(run.id, streams.resume_after(last_event_id, after))
        return streams.response(context.followers, caller, frames)
    page = await context.database_call(context.events.page, run.id, position(cursor, after), limit)
    items = tuple(event_answer(row) for row in page.rows)
    return Page(items=items, next_cursor=str(items[-1].seq) if page.more else None)


_ATTEMPT_BYTES: Final = 2**20
_WITH_LINES: Final = 20  # newest failures


@router.get("/attempts", summary="Worker groups of a run", responses=problem_answers(404, 422))
async def get_attempts(
    run: VisibleRun,
    context: Context,
    limit: Limit = 200,
    cursor: Cursor = None,
    workers: Annotated[bool, Query(description="Whether to list the workers.")] = True,
) -> Page[Attempt]:
    """Attempts with their workers, oldest first. A page may end before `limit`: the events of its
    attempts are limited to 1 MiB together, unless it has a single attempt."""
    rows: list[EventRow] = []
    starts: list[int] = []
    after, more = position(cursor, 0), True
    while more and len(starts) < 2:
        page = await context.database_call(
            context.events.page, run.id, after, 1000, attempts.ATTEMPT_KINDS, _ATTEMPT_BYTES
        )
        rows, more = [*rows, *page.rows], page.more
        after = rows[-1].seq if rows else after
        starts = [place for place, row in enumerate(rows) if row.kind == EventKind.ATTEMPT_STARTED]
    num = min(limit, len(starts) - 1 if more else len(starts))
    following = rows[starts[num]] if num < len(starts) else None
    # the start of the next attempt may be all that says that the last one of this page has ended
    found = (
        await context.folded(attempts.attempts, rows[: starts[num] + 1] if following else rows)
    )[:num]
    if not workers:
        found = [attempt.model_copy(update={"workers": ()}) for attempt in found]
    return Page(items=tuple(found), next_cursor=str(following.seq - 1) if following else None)


@router.get("/failures", summary="Failures of a run", responses=problem_answers(404, 422))
async def get_failures(
    run: VisibleRun,
    context: Context,
    lines: Annotated[
        int,
        Query(ge=0, le=200, description="Maximum last log lines of the first failing rank."),
    ] = 10,
    limit: Limit = 200,
    cursor: Cursor = None,
) -> Page[Failure]:
    """Failures with their verdict, evidence and action, oldest first.

    `last_lines` are the last log lines of the first failing rank, for the newest 20 failures, if
    the storage responds.
    """
    start = position(cursor, 0)
    found, num = await failures(context, run.id, slice(start, start + limit), lines)
    end = start + limit
    return Page(items=tuple(found), next_cursor=str(end) if end < num else None)


async def failures(
    context: ApiContext, run_id: str, part: slice, lines: int = 10
) -> tuple[list[Failure], int]:
    """Return a part of a run's failures, oldest first, and how many it has in all."""
    events = await context.database_call(context.events.of_kinds, run_id, attempts.FAILURE_KINDS)
    every = await context.folded(attempts.failures, events)
    shown = every[part]
    old = max(0, len(every) - _WITH_LINES - part.indices(len(every))[0])
    newest = await with_last_lines(context, run_id, shown[old:], lines)
    return [*shown[:old], *newest], len(every)


@router.get("/stragglers", summary="Stragglers of a run", responses=problem_answers(404))
async def get_stragglers(run: VisibleRun, context: Context) -> StragglerReport:
    """Each rank's latest step time and wait for the others, by rank and by node; and every rank
    that was a straggler for long enough to matter."""
    events = await context.database_call(
        context.events.of_kinds, run.id, protection.STRAGGLER_KINDS
    )
    times = await context.database_call(context.events.newest, run.id, EventKind.RANK_TIMES)
    use = await context.database_call(
        context.events.newest, run.id, EventKind.GPU_USE, protection.GPU_EVENTS
    )
    return await context.folded(protection.stragglers, [*events, *times, *use])


@router.get(
    "/rehearsal",
    summary="Whether a restart was rehearsed on a run's code",
    responses=problem_answers(404),
)
async def get_rehearsal(run: VisibleRun, context: Context) -> RunRehearsal:
    """What `everstep rehearse` has shown of a restart on the run's code before it was submitted, as
    its submitter says: equal in every bit, or what was first different."""
    return protection.run_rehearsal(run)


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
    events = await context.database_call(context.events.of_kinds, run.id, protection.SAMPLE_KINDS)
    return await context.folded(protection.samples, events)


# ---------------------------------------------------------------- series

# Routes of a run's metrics.

_MOST_POINTS: Final = 200_000
"""Points of all series of one answer together."""


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


# ---------------------------------------------------------------- goodput of all runs

# Route of the goodput of all runs, by project.

totals: Final = ApiRouter("/v1", "history")


@totals.get("/goodput", summary="Where the time of all runs went", responses=problem_answers(422))
async def get_project_goodput(
    context: Context,
    caller: Caller,
    project: Annotated[str | None, Query(max_length=64, description="Only this project.")] = None,
) -> Page[ProjectGoodput]:
    """The sum of all runs' ledgers, for each project that the token has access to. Deleted runs are
    left out."""
    named = [name for name in (project, caller.project) if name is not None]
    wanted = named or None
    if len(set(named)) > 1:
        return Page(items=(), next_cursor=None)
    found = await context.database_call(context.time_book.by_project, context.clock(), wanted)
    return Page(items=tuple(found), next_cursor=None)
