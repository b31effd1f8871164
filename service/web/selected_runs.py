"""What is done with several runs of the list at once: compare, cancel, delete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from service.api import runs
from service.api.auth import Principal, controlled_run, visible_run
from service.api.context import ApiContext, Context
from service.api.problems import ProblemError, as_problem, invalid_request
from service.db.audit import begin_entry, current_entry
from service.db.errors import DatabaseUnavailable
from service.web.rendering import PageRoute, page
from service.web.session import CheckedFields, WebCaller, local_path

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

_ACTIONS: Final[Mapping[str, Callable[..., Awaitable[Any]]]] = {
    "cancel": runs.cancel_run,
    "delete": runs.delete_run,
}


@router.post("/runs/selected")
async def post_selected(
    request: Request, context: Context, caller: WebCaller, fields: CheckedFields
) -> Response:
    """Do the same with each run of the list that was ticked; tell those with which it failed."""
    given = dict(fields)
    ids = list(dict.fromkeys(value for name, value in fields if name == "run"))
    action, back = given.get("action", ""), local_path(given.get("back"))
    if action == "compare":
        query = urlencode([("run", run_id) for run_id in ids])
        return RedirectResponse(f"/compare?{query}" if ids else "/compare", 303)
    if action not in _ACTIONS:
        raise invalid_request("action", msg="choose compare, cancel or delete")
    caller.require("submitter")
    refused = await _each(context, caller, action, ids)
    if not refused:
        return RedirectResponse(back, 303)
    return page(
        request,
        "selected.html",
        caller,
        409,
        action=action,
        refused=refused,
        num_done=len(ids) - len(refused),
        back=back,
    )


async def _each(
    context: ApiContext, caller: Principal, action: str, ids: list[str]
) -> list[tuple[str, str]]:
    """Do it with each run; return those with which it failed, and why. Each has an entry of its own
    in the audit log."""
    refused, call = [], current_entry()
    for run_id in ids:
        if call is not None:
            begin_entry(replace(call, target=run_id, seq=None, written_as=None))
        try:
            run = await controlled_run(await visible_run(run_id, context, caller), caller)
            await _ACTIONS[action](run, context)
        except DatabaseUnavailable:
            raise
        except Exception as exc:
            problem: ProblemError = as_problem(exc)
            if problem.status >= 500 and not isinstance(exc, ProblemError):
                raise
            refused.append((run_id, problem.detail))
        finally:
            begin_entry(call)
    return refused
