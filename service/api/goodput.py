"""Route of the goodput of all runs, by project."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query

from everstep.wire import Page, ProjectGoodput
from service.api.auth import Caller
from service.api.context import Context
from service.api.openapi import problem_answers

router: Final = APIRouter(prefix="/v1", tags=["history"])


@router.get("/goodput", summary="Where the time of all runs went", responses=problem_answers(422))
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
