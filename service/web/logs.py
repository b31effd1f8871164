"""Logs and events of a run, newest last and newest first."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from everstep.text import events as event_words
from everstep.text.words import without_colours
from everstep.wire import LogLine
from everstep.wire.events import EventKind
from service.api import streams
from service.api.answers import event_answer
from service.api.blocking import db_read
from service.api.dependencies import Events, Logs, Streams
from service.api.log_views import LogView
from service.web.rendering import PageRoute
from service.web.run_page import Pages
from service.web.session import WebCaller, WebRun

router: Final = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)

_PAGE_LINES: Final = 500
_CHUNK_LINES: Final = 1000
_PIECE_LINES: Final = 500
_SEARCHED_LINES: Final = 50_000
_SEARCH_S: Final = 5.0
"""Seconds after which a page shows what was found so far, with a link to older lines."""
LONGEST_MESSAGE: Final = 4000


@dataclass(frozen=True)
class LogPage:
    """Lines by time, oldest first."""

    lines: tuple[LogLine, ...]
    older_than: int | None
    """Number of the line before which older ones are shown; None if there are none."""
    num_searched: int
    """Number of lines that were searched."""


@router.get("/logs")
async def get_logs(
    run: WebRun,
    pages: Pages,
    logs: Logs,
    rank: Annotated[str, Query(pattern=r"^\d{0,9}$")] = "",
    attempt: Annotated[str, Query(pattern=r"^\d{0,9}$")] = "",
    search: Annotated[str, Query(max_length=200)] = "",
    before: Annotated[int | None, Query(ge=1, le=2**53)] = None,
) -> Response:
    view = logs.view(run.id, int(rank) if rank else None, int(attempt) if attempt else None)
    return await pages.page(
        "logs.html",
        run,
        found=await newest(view, before, search.strip()),
        given={"rank": rank, "attempt": attempt, "search": search.strip()},
        is_newest=before is None,
        longest=LONGEST_MESSAGE,
        searched_most=_SEARCHED_LINES,
    )


@router.get("/logs.txt")
async def get_all_lines(
    run: WebRun,
    logs: Logs,
    streamed: Streams,
    caller: WebCaller,
    rank: Annotated[str, Query(pattern=r"^\d{0,9}$")] = "",
    attempt: Annotated[str, Query(pattern=r"^\d{0,9}$")] = "",
) -> StreamingResponse:
    """Return every line as a file, in the order of attempts and time."""
    view = logs.view(run.id, int(rank) if rank else None, int(attempt) if attempt else None)
    headers = {"Content-Disposition": f'attachment; filename="{run.id}.log"'}
    pieces = _all_lines(view, await view.read(0, _PIECE_LINES))
    return streams.response(streamed, caller, pieces, "text/plain", headers)


async def _all_lines(view: LogView, lines: list[LogLine]) -> AsyncGenerator[bytes]:
    """Yield the text of these lines and of all after them, in pieces."""
    while lines:
        texts = streams.piece_of(
            f"{line.at:%Y-%m-%dT%H:%M:%S.%fZ} attempt {line.attempt} "
            f"{'driver' if line.rank is None else f'rank {line.rank}'} {line.level.upper()} "
            f"{without_colours(line.message)}\n".encode()
            for line in lines
        )
        after, piece = lines[len(texts) - 1].seq, b"".join(texts)
        del lines, texts  # nothing but the bytes is held while the client takes them in
        yield piece
        lines = await view.read(after, _PIECE_LINES)


async def newest(view: LogView, before: int | None, search: str) -> LogPage:
    """Return the last lines by time, or those before line ``before``, that contain ``search``,
    case-insensitive.

    At most 50,000 lines are searched, or as many as 5 s allow: lines whose times jump lie far apart
    in the logs. A link continues with older ones.
    """
    end = await view.newest()
    if before is not None:
        end = view.place_in_time(before)
    found: list[LogLine] = []
    searched, give_up = 0, time.monotonic() + _SEARCH_S
    while end > 0 and len(found) < _PAGE_LINES and searched < _SEARCHED_LINES:
        if searched and time.monotonic() > give_up:
            break
        start = max(0, end - _CHUNK_LINES)
        chunk = await view.read_in_time(start, end)
        matching = (
            [line for line in chunk if search.casefold() in line.message.casefold()]
            if search
            else chunk
        )
        searched += end - start
        end = view.place_in_time(chunk[0].seq) if chunk else start
        room = _PAGE_LINES - len(found)
        if len(matching) > room:
            matching = matching[-room:]
            searched -= view.place_in_time(matching[0].seq) - end
            end = view.place_in_time(matching[0].seq)
        found = [*matching, *found]
    return LogPage(tuple(found), view.line_at(end) if end > 0 else None, searched)


# ---------------------------------------------------------------- events page

# What happened in a run: its events in words, newest first, by group.

PAGE_EVENTS: Final = 100
LONGEST_TEXT: Final = 2000
GROUPS: Final[Mapping[str, frozenset[EventKind]]] = {
    "failures": frozenset(
        {
            EventKind.FAILURE,
            EventKind.EVIDENCE,
            EventKind.FELL_BACK,
            EventKind.RECOVERED,
            EventKind.STRAGGLER,
            EventKind.STRAGGLER_MOVED,
            EventKind.SNAPSHOTS,
            EventKind.NUMERICS_CHANGED,
            EventKind.CHECKPOINT_FAILED,
            EventKind.CHECKPOINT_CORRUPT,
            EventKind.DRILL_STARTED,
            EventKind.DRILL_FAILED,
        }
    ),
    "status": frozenset(
        {
            EventKind.STATUS,
            EventKind.WAITING,
            EventKind.STOP_REQUESTED,
            EventKind.WORKERS_LIMITED,
            EventKind.ATTEMPT_STARTED,
            EventKind.RESTORED,
            EventKind.TRAINING_STARTED,
            EventKind.SHARES_PLANNED,
            EventKind.REPLAY_COMPARED,
        }
    ),
    "checkpoints": frozenset(
        {
            EventKind.CHECKPOINT_COMMITTED,
            EventKind.CHECKPOINT_FAILED,
            EventKind.CHECKPOINT_CORRUPT,
            EventKind.CHECKPOINT_CADENCE,
        }
    ),
    "evaluations": frozenset({EventKind.EVALUATED}),
    "profiles": frozenset(
        {EventKind.PROFILE_STARTED, EventKind.PROFILE_DONE, EventKind.PROFILE_FAILED}
    ),
    "stacks": frozenset({EventKind.STACKS}),
}
"""Events of each filter."""
SHOWN: Final = frozenset().union(*GROUPS.values())
"""Events that have words. A page holds only these, however many others lie between them."""


@router.get("/events")
async def get_events(
    run: WebRun,
    pages: Pages,
    events: Events,
    show: Annotated[str, Query(max_length=16)] = "",
    before: Annotated[int | None, Query(ge=1, le=2**53)] = None,
) -> Response:
    """Show events as text, newest first; minor events are left out."""
    found = await db_read(events.page_before, run.id, before, PAGE_EVENTS, GROUPS.get(show, SHOWN))
    shown = [event_answer(row) for row in found.rows]
    return await pages.page(
        "events.html",
        run,
        events=[(event, text) for event in shown if (text := event_words.event(event))],
        groups=("", *GROUPS),
        given=show if show in GROUPS else "",
        is_newest=before is None,
        older_than=found.rows[-1].seq if found.more else None,
        longest=LONGEST_TEXT,
    )
