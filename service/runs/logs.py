"""Routes of log lines of ranks and the driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Final

from fastapi import Query, Request, Response

from everstep.wire import Failure, LogLine, Page, Verdict
from service.api import streams
from service.api.answers import Cursor, answer_of, position
from service.api.auth import Caller, VisibleRun
from service.api.bodies import ApiRouter
from service.api.context import ApiContext, Context
from service.api.log_views import POLL_S, LogView
from service.api.openapi import STREAM, problem_answers
from service.api.streams import piece_of
from storage.errors import StorageError
from storage.logs.rank_logs import LoggedLine, last_rank_lines
from storage.run_dir import RunDir

router: Final = ApiRouter("/v1/runs/{run_id}", "history")

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
    context: Context,
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
    view = context.logs.view(run.id, rank, attempt)
    if follow or streams.wanted(request):
        start = streams.resume_after(last_event_id, position(cursor, after))
        return streams.response(
            context.followers, caller, _follow(context, run.id, view, start, until_ended=follow)
        )
    lines = await view.read(position(cursor, after), limit)
    return Page(
        items=tuple(lines), next_cursor=str(lines[-1].seq) if view.holds_more(lines) else None
    )


async def _follow(
    context: ApiContext, run_id: str, view: LogView, after: int, *, until_ended: bool
) -> AsyncGenerator[bytes]:
    """Yield frames of lines after ``after``; with ``until_ended`` also new ones, until the run has
    ended or is deleted."""
    quiet_s = 0.0
    while not context.feed.closed:
        # The status first: no lines are written after a run has ended, so a later read is complete.
        run = await context.database_call(context.runs.get, run_id)
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
    context: ApiContext, run_id: str, failures: Sequence[Failure], limit: int
) -> list[Failure]:
    """Return the failures with at most ``limit`` last lines; without lines if the storage does not
    respond."""
    if limit == 0:
        return list(failures)
    logged = await asyncio.gather(
        *(_last_lines(context, run_id, failure, limit) for failure in failures)
    )
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


async def _last_lines(
    context: ApiContext, run_id: str, failure: Failure, limit: int
) -> tuple[LogLine, ...]:
    if failure.first_rank is None and failure.verdict != Verdict.CONTROL_PLANE:
        return ()
    try:
        found = await context.storage_call(_read, RunDir(context.storage, run_id), failure, limit)
    except StorageError:
        return ()
    return tuple(answer_of(LogLine, line, seq=0) for line in found)
