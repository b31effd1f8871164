"""What happened in a run: its events in words, newest first, by group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from everstep.text import events as event_words
from everstep.wire.events import EventKind
from service.api.answers import event_answer
from service.api.context import Context
from service.web.rendering import PageRoute
from service.web.run_pages import run_page
from service.web.session import WebCaller, WebRun

router: Final = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)

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
    request: Request,
    run: WebRun,
    context: Context,
    caller: WebCaller,
    show: Annotated[str, Query(max_length=16)] = "",
    before: Annotated[int | None, Query(ge=1, le=2**53)] = None,
) -> Response:
    """Show events as text, newest first; minor events are left out."""
    found = await context.database_call(
        context.events.page_before, run.id, before, PAGE_EVENTS, GROUPS.get(show, SHOWN)
    )
    events = [event_answer(row) for row in found.rows]
    return await run_page(
        request,
        "events.html",
        context,
        caller,
        run,
        events=[(event, text) for event in events if (text := event_words.event(event))],
        groups=("", *GROUPS),
        given=show if show in GROUPS else "",
        is_newest=before is None,
        older_than=found.rows[-1].seq if found.more else None,
        longest=LONGEST_TEXT,
    )
