"""Logs of a run: the newest lines, by rank, attempt or text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from everstep.wire import LogLine
from service.api.context import Context
from service.api.log_views import LogView
from service.web.rendering import PageRoute
from service.web.run_pages import run_page
from service.web.session import WebCaller, WebRun

router: Final = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)

_PAGE_LINES: Final = 500
_CHUNK_LINES: Final = 1000
_SEARCHED_LINES: Final = 50_000
LONGEST_MESSAGE: Final = 4000


@dataclass(frozen=True)
class LogPage:
    """Lines, oldest first."""

    lines: tuple[LogLine, ...]
    older_than: int | None
    """Position from which to show older lines; None if there are none."""
    num_searched: int
    """Number of lines that were searched."""


@router.get("/logs")
async def get_logs(
    request: Request,
    run: WebRun,
    context: Context,
    caller: WebCaller,
    rank: Annotated[str, Query(pattern=r"^\d{0,9}$")] = "",
    attempt: Annotated[str, Query(pattern=r"^\d{0,9}$")] = "",
    search: Annotated[str, Query(max_length=200)] = "",
    before: Annotated[int | None, Query(ge=1, le=2**53)] = None,
) -> Response:
    view = context.logs.view(run.id, int(rank) if rank else None, int(attempt) if attempt else None)
    return await run_page(
        request,
        "logs.html",
        context,
        caller,
        run,
        found=await newest(view, before, search.strip()),
        given={"rank": rank, "attempt": attempt, "search": search.strip()},
        is_newest=before is None,
        longest=LONGEST_MESSAGE,
        searched_most=_SEARCHED_LINES,
    )


async def newest(view: LogView, before: int | None, search: str) -> LogPage:
    """Return the last lines, or those before line ``before``, that contain ``search``,
    case-insensitive.

    At most 50,000 lines are searched; a link continues with older ones.
    """
    end = await view.newest() if before is None else before - 1
    found: list[LogLine] = []
    searched = 0
    while end > 0 and len(found) < _PAGE_LINES and searched < _SEARCHED_LINES:
        start = max(0, end - _CHUNK_LINES)
        chunk = await _between(view, start, end)
        matching = (
            [line for line in chunk if search.casefold() in line.message.casefold()]
            if search
            else chunk
        )
        room = _PAGE_LINES - len(found)
        if len(matching) > room:
            matching = matching[-room:]
            start = matching[0].seq - 1
        found = [*matching, *found]
        searched += end - start
        end = start
    return LogPage(tuple(found), end + 1 if end > 0 else None, searched)


async def _between(view: LogView, start: int, end: int) -> Sequence[LogLine]:
    """Return the lines after ``start`` up to ``end``."""
    lines: list[LogLine] = []
    while start < end:
        more = await view.read(start, end - start, fresh=False)
        if not more:
            break
        lines += more
        start = more[-1].seq
    return lines
