"""Routes of browser sessions: a caller's own, and for administrators everybody's."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Path

from everstep.wire import Page
from everstep.wire.team import Session
from service.api.answers import to_time
from service.api.auth import Caller, Principal
from service.api.context import Context
from service.api.openapi import problem_answers
from service.api.paging import Cursor, Limit, page_of
from service.api.problems import not_found
from service.db.sessions import Holder
from service.model.rows import SessionRow

router: Final = APIRouter(prefix="/v1", tags=["administration"])

SessionPath = Annotated[str, Path(max_length=32, description="The session's id: `ses_…`.")]


def _reached(caller: Principal) -> Holder | None:
    """Return whose sessions the caller reaches; None for everybody's."""
    return None if caller.may("admin") else caller.holder


@router.get("/sessions", summary="Log-ins of browsers", responses=problem_answers(422))
async def list_sessions(
    caller: Caller, context: Context, limit: Limit = 50, cursor: Cursor = None
) -> Page[Session]:
    """Sessions that have not ended, newest first: the caller's own, or everybody's for an
    administrator. A user's own are those of all their log-ins."""
    found = await context.database_call(context.sessions.valid, _reached(caller))
    shown, behind = page_of(found, lambda row: (-row.created_at, row.sha256), cursor, limit)
    return Page(items=tuple(map(_session_answer, shown)), next_cursor=behind)


@router.delete(
    "/sessions/{session_id}",
    status_code=204,
    summary="End a session",
    responses=problem_answers(404, 422),
)
async def revoke_session(caller: Caller, session_id: SessionPath, context: Context) -> None:
    """Effective on every replica as soon as this returns."""
    if not await context.database_call(context.sessions.end_by_id, session_id, _reached(caller)):
        raise not_found(f"session {session_id} does not exist, or has ended")


def _session_answer(row: SessionRow) -> Session:
    return Session(
        id=row.id,
        name=row.name,
        role=row.role,
        project=row.project,
        created_at=to_time(row.created_at),
        expires_at=to_time(row.expires_at),
        address=row.address,
        browser=row.browser,
    )
