"""Routes of a run's history: events, attempts, failures, series of metrics, logs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Final

from fastapi import Query, Request, Response

from everstep.wire import (
    Attempt,
    Event,
    Failure,
    Goodput,
    LogLine,
    MetricSeries,
    Page,
    ProjectGoodput,
    Samples,
    StragglerReport,
    Verdict,
)
from everstep.wire.drills import RunRehearsal
from everstep.wire.events import EventKind, system_figure
from service.api import streams
from service.api.answers import Cursor, Limit, answer_of, event_answer, position
from service.api.auth import Caller, VisibleRun
from service.api.blocking import db_read, folded, of_history, storage_call
from service.api.bodies import ApiRouter
from service.api.dependencies import Events, Feed, Logs, Runs, Series, Streams, TheStorage
from service.api.log_views import POLL_S, LogView
from service.api.openapi import STREAM, problem_answers
from service.api.streams import EventFeed, piece_of
from service.db.events import MIN_POINTS, EventStore, Point, SeriesStore
from service.db.runs import RunStore
from service.model.rows import EventRow
from service.projections import attempts, protection
from service.projections.goodput import TimeLedger
from storage.errors import StorageError
from storage.filesystem import Storage
from storage.logs.rank_logs import LoggedLine, last_rank_lines
from storage.run_dir import RunDir

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
    events: Events,
    feed: Feed,
    streamed: Streams,
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
        frames = feed.follow(run.id, streams.resume_after(last_event_id, after))
        return streams.response(streamed, caller, frames)
    page = await db_read(events.page, run.id, position(cursor, after), limit)
    items = tuple(event_answer(row) for row in page.rows)
    return Page(items=items, next_cursor=str(items[-1].seq) if page.more else None)


_ATTEMPT_BYTES: Final = 2**20
_WITH_LINES: Final = 20  # newest failures


@router.get("/attempts", summary="Worker groups of a run", responses=problem_answers(404, 422))
async def get_attempts(
    run: VisibleRun,
    events: Events,
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
        page = await db_read(
            events.page, run.id, after, 1000, attempts.ATTEMPT_KINDS, _ATTEMPT_BYTES
        )
        rows, more = [*rows, *page.rows], page.more
        after = rows[-1].seq if rows else after
        starts = [place for place, row in enumerate(rows) if row.kind == EventKind.ATTEMPT_STARTED]
    num = min(limit, len(starts) - 1 if more else len(starts))
    following = rows[starts[num]] if num < len(starts) else None
    # the start of the next attempt may be all that says that the last one of this page has ended
    found = (await folded(attempts.attempts, rows[: starts[num] + 1] if following else rows))[:num]
    if not workers:
        found = [attempt.model_copy(update={"workers": ()}) for attempt in found]
    return Page(items=tuple(found), next_cursor=str(following.seq - 1) if following else None)


@router.get("/failures", summary="Failures of a run", responses=problem_answers(404, 422))
async def get_failures(
    run: VisibleRun,
    events: Events,
    storage: TheStorage,
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
    found, num = await failures(events, storage, run.id, slice(start, start + limit), lines)
    end = start + limit
    return Page(items=tuple(found), next_cursor=str(end) if end < num else None)


async def failures(
    events: EventStore, storage: Storage, run_id: str, part: slice, lines: int = 10
) -> tuple[list[Failure], int]:
    """Return a part of a run's failures, oldest first, and how many it has in all."""
    every = await of_history(events, run_id, attempts.FAILURE_KINDS, attempts.failures)
    shown = every[part]
    old = max(0, len(every) - _WITH_LINES - part.indices(len(every))[0])
    newest = await with_last_lines(RunDir(storage, run_id), shown[old:], lines)
    return [*shown[:old], *newest], len(every)


@router.get("/stragglers", summary="Stragglers of a run", responses=problem_answers(404))
async def get_stragglers(run: VisibleRun, events: Events) -> StragglerReport:
    """Each rank's latest step time and wait for the others, by rank and by node; and every rank
    that was a straggler for long enough to matter."""
    slow = await db_read(events.of_kinds, run.id, protection.STRAGGLER_KINDS)
    times = await db_read(events.newest, run.id, EventKind.RANK_TIMES)
    use = await db_read(events.newest, run.id, EventKind.GPU_USE, protection.GPU_EVENTS)
    return await folded(protection.stragglers, [*slow, *times, *use])


@router.get(
    "/rehearsal",
    summary="Whether a restart was rehearsed on a run's code",
    responses=problem_answers(404),
)
async def get_rehearsal(run: VisibleRun) -> RunRehearsal:
    """What `everstep rehearse` has shown of a restart on the run's code before it was submitted, as
    its submitter says: equal in every bit, or what was first different."""
    return protection.run_rehearsal(run)


@router.get("/goodput", summary="Where a run's time went", responses=problem_answers(404))
async def get_goodput(run: VisibleRun, runs: Runs) -> Goodput:
    """Every second since the run's creation is in exactly one bucket; `goodput` is the productive
    share."""
    return TimeLedger.load(run.time_ledger).close(
        runs.clock() if run.finished_at is None else run.finished_at
    )


@router.get("/samples", summary="Samples that a run used", responses=problem_answers(404))
async def get_samples(run: VisibleRun, events: Events) -> Samples:
    """For each finished epoch, over the committed lineage: how many samples were used once, more
    than once or never."""
    return await of_history(events, run.id, protection.SAMPLE_KINDS, protection.samples)


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
    series: Series,
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
        known = await db_read(series.names, run.id)
        wanted = [name for name in known if system_figure(name) is None]
    else:
        wanted = [name for name in dict.fromkeys(names.split(",")) if name]
    points = max(MIN_POINTS, min(max_points, _MOST_POINTS // max(1, len(wanted))))
    encoded = await asyncio.gather(
        *(db_read(_encoded, series, run.id, name, points) for name in wanted)
    )
    return Response('{"series":{' + ",".join(encoded) + "}}", media_type="application/json")


def _encoded(series: SeriesStore, run_id: str, name: str, max_points: int) -> str:
    """Return a name with its points as JSON. Of all series only these texts are in memory at once,
    and none is made in the event loop."""
    points = [
        (point.step, point.at, point.value) for point in series.points(run_id, name, max_points)
    ]
    return f"{json.dumps(name)}:{json.dumps(points, separators=(',', ':'))}"


async def thinned(
    series: SeriesStore, run_id: str, names: Sequence[str], max_points: int
) -> dict[str, list[Point]]:
    """Return these series, down-sampled. Each is read in its own thread, so that several cores
    share a long history."""
    found = await asyncio.gather(
        *(db_read(series.points, run_id, name, max_points) for name in names)
    )
    return {
        name: [(point.step, point.at, point.value) for point in points]
        for name, points in zip(names, found, strict=True)
    }


# ---------------------------------------------------------------- logs

# Log lines of ranks and the driver.

_STREAM_LINES: Final = 500


@router.get(
    "/logs",
    summary="Log lines of a run, as pages or as a stream",
    response_model=Page[LogLine],
    responses={200: STREAM, **problem_answers(404, 422)},
)
async def get_logs(
    request: Request,
    run: VisibleRun,
    logs: Logs,
    runs: Runs,
    feed: Feed,
    streamed: Streams,
    caller: Caller,
    rank: Annotated[
        int | None, Query(ge=0, le=2**31, description="Only lines of this rank.")
    ] = None,
    attempt: Annotated[
        int | None,
        Query(ge=0, le=2**31, description="Only lines of this attempt; the driver is attempt 0."),
    ] = None,
    after: Annotated[
        int,
        Query(ge=0, le=2**53, description="Only lines after this `seq`, with the same filters."),
    ] = 0,
    follow: Annotated[bool, Query(description="Stream new lines until the run has ended.")] = False,
    limit: Annotated[
        int, Query(ge=1, le=5000, description="Maximum lines per page; streams have no limit.")
    ] = 1000,
    cursor: Cursor = None,
    last_event_id: streams.LastEventId = None,
) -> Page[LogLine] | Response:
    """Lines of every rank and of the driver over all attempts, by attempt and time; kept after
    their node is gone.

    With `follow=true` or `Accept: text/event-stream` a stream of server-sent events: `id` is the
    `seq`, `data` the line. It waits while the run is QUEUED, honours `Last-Event-ID`, and ends
    after the last line of a run that has ended.
    """
    view = logs.view(run.id, rank, attempt)
    if follow or streams.wanted(request):
        start = streams.resume_after(last_event_id, position(cursor, after))
        lines = _follow(runs, feed, run.id, view, start, until_ended=follow)
        return streams.response(streamed, caller, lines)
    found = await view.read(position(cursor, after), limit)
    return Page(
        items=tuple(found), next_cursor=str(found[-1].seq) if view.holds_more(found) else None
    )


async def _follow(
    runs: RunStore, feed: EventFeed, run_id: str, view: LogView, after: int, *, until_ended: bool
) -> AsyncGenerator[bytes]:
    """Yield frames of lines after ``after``; with ``until_ended`` also new ones, until the run has
    ended or is deleted."""
    quiet_s = 0.0
    while not feed.closed:
        # The status first: no lines are written after a run has ended, so a later read is complete.
        run = await db_read(runs.get, run_id)
        ended = run is None or run.status.terminal or not until_ended
        try:
            lines = await view.read(after, _STREAM_LINES, fresh=ended)
        except StorageError:
            # the response has started: end it; the client reconnects with its Last-Event-ID
            return
        if lines:
            frames = piece_of(streams.frame(line.seq, line.model_dump_json()) for line in lines)
            after, quiet_s = lines[len(frames) - 1].seq, 0.0
            piece = b"".join(frames)
            del lines, frames
            yield piece
        elif ended:
            return
        else:
            await asyncio.sleep(POLL_S)
            quiet_s += POLL_S
            if quiet_s >= streams.HEARTBEAT_S:
                quiet_s = 0.0
                yield streams.HEARTBEAT


# ---------------------------------------------------------------- last lines

# The last log lines of the first failing rank, for a failure.


async def with_last_lines(
    run_dir: RunDir, failures: Sequence[Failure], limit: int
) -> list[Failure]:
    """Return the failures with at most ``limit`` last lines; without lines if the storage does not
    respond."""
    if limit == 0:
        return list(failures)
    logged = await asyncio.gather(*(_last_lines(run_dir, failure, limit) for failure in failures))
    return [
        each.model_copy(update={"last_lines": lines})
        for each, lines in zip(failures, logged, strict=True)
    ]


def _read(run_dir: RunDir, failure: Failure, limit: int) -> list[LoggedLine]:
    if failure.first_rank is not None:
        return last_rank_lines(
            run_dir, failure.submission, failure.attempt, failure.first_rank, limit
        )
    # The lost driver is either the one that reports it, after it lost its controller, or the one of
    # the previous submission.
    before = failure.at.timestamp()
    by_submission = [
        last_rank_lines(run_dir, submission, failure.attempt, None, limit, before)
        for submission in (failure.submission - 1, failure.submission)
    ]
    return [line for lines in by_submission for line in lines][-limit:]


async def _last_lines(run_dir: RunDir, failure: Failure, limit: int) -> tuple[LogLine, ...]:
    if failure.first_rank is None and failure.verdict != Verdict.CONTROL_PLANE:
        return ()
    try:
        found = await storage_call(_read, run_dir, failure, limit)
    except StorageError:
        return ()
    return tuple(answer_of(LogLine, line, seq=0) for line in found)


# ---------------------------------------------------------------- goodput of all runs

# Route of the goodput of all runs, by project.

totals: Final = ApiRouter("/v1", "history")


@totals.get("/goodput", summary="Where the time of all runs went", responses=problem_answers(422))
async def get_project_goodput(
    runs: Runs,
    caller: Caller,
    project: Annotated[str | None, Query(max_length=64, description="Only this project.")] = None,
) -> Page[ProjectGoodput]:
    """The sum of all runs' ledgers, for each project that the token has access to. Deleted runs are
    left out."""
    named = [name for name in (project, caller.project) if name is not None]
    wanted = named or None
    if len(set(named)) > 1:
        return Page(items=(), next_cursor=None)
    found = await db_read(runs.time_by_project, runs.clock(), wanted)
    return Page(items=tuple(found), next_cursor=None)
