"""Routes of log lines of ranks and the driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from everstep.wire import LogLine, Page
from service.api import sse
from service.api.auth import Caller, VisibleRun
from service.api.context import ApiContext, Context
from service.api.followers import piece_of
from service.api.log_views import POLL_S, LogView
from service.api.openapi import STREAM, problem_answers
from service.api.paging import Cursor, position
from storage.errors import StorageError

router: Final = APIRouter(prefix="/v1/runs/{run_id}", tags=["history"])

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
    last_event_id: sse.LastEventId = None,
) -> Page[LogLine] | Response:
    """Lines of every rank and of the driver over all attempts, by attempt and time; kept after
    their node is gone.

    With `follow=true` or `Accept: text/event-stream` a stream of server-sent events: `id` is the
    `seq`, `data` the line. It waits while the run is QUEUED, honours `Last-Event-ID`, and ends
    after the last line of a run that has ended.
    """
    view = context.logs.view(run.id, rank, attempt)
    if follow or sse.wanted(request):
        start = sse.resume_after(last_event_id, position(cursor, after))
        return sse.response(
            context, caller, _follow(context, run.id, view, start, until_ended=follow)
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
            frames = piece_of(sse.frame(line.seq, line.model_dump_json()) for line in lines)
            after, quiet_s = lines[len(frames) - 1].seq, 0.0
            piece = b"".join(frames)
            del lines, frames
            yield piece
        elif ended:
            return
        else:
            await asyncio.sleep(POLL_S)
            quiet_s += POLL_S
            if quiet_s >= sse.HEARTBEAT_S:
                quiet_s = 0.0
                yield sse.HEARTBEAT
