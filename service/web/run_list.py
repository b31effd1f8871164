"""The page *runs*: a live list with search, filters, a choice of columns and an order. Its URL
contains all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from everstep.text import words as cli_words
from everstep.wire import Run, RunStatus
from service.api.answers import MOST_CURSOR_CHARS
from service.api.auth import controlled_run, visible_run
from service.api.callers import Principal
from service.api.context import ApiContext, Context
from service.api.problems import ApiProblem, as_problem, invalid_request
from service.db.audit import begin_entry, current_entry
from service.db.engine import DatabaseUnavailable
from service.db.run_lookup import RunFilter, RunOrder
from service.runs import routes as runs
from service.runs.routes import found_runs, parse_order, parse_tag
from service.web import run_columns
from service.web.rendering import STATUS_GROUPS, PageRoute, page, progress_share
from service.web.session import CheckedFields, WebCaller, local_path

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

_PAGE_RUNS: Final = 50
_NEWEST: Final = RunOrder("created_at", descending=True)


@router.get("/runs")
async def get_runs(
    request: Request,
    context: Context,
    caller: WebCaller,
    search: Annotated[str, Query(max_length=128)] = "",
    status: Annotated[str, Query(max_length=16)] = "",
    project: Annotated[str, Query(max_length=64)] = "",
    tag: Annotated[str, Query(max_length=400)] = "",
    sort: Annotated[str, Query(max_length=400)] = "",
    columns: Annotated[list[str] | None, Query()] = None,
    cursor: Annotated[str, Query(max_length=MOST_CURSOR_CHARS)] = "",
) -> Response:
    search = search.strip()
    tags = (parse_tag(tag),) if tag else ()
    statuses = STATUS_GROUPS.get(status, (RunStatus(status),) if status in set(RunStatus) else ())
    wanted = RunFilter(
        project=project or None, statuses=tuple(statuses), search=search or None, tags=tags
    )
    order = parse_order(sort)
    shown = run_columns.chosen(columns or ())
    found = await found_runs(context, caller, wanted, _PAGE_RUNS, cursor or None, order)
    where = RunFilter(project=caller.project or project or None, search=search or None, tags=tags)
    counts = await context.database_call(context.runs.count_by_status, where)
    filters = {"search": search, "status": status, "project": project, "tag": tag}
    given = filters | {"sort": str(order) if order else "", "columns": _written(shown)}

    def link(**changes: str | None) -> str:
        """Return the URL of this page with other filters, from its first run."""
        return _address(given | changes)

    is_update = "hx-request" in request.headers
    specs = (
        await _specs(context, found.items)
        if not is_update or any(column.key.startswith("spec.") for column in shown)
        else {}
    )
    return page(
        request,
        "runs.html",
        caller,
        runs=found.items,
        specs=specs,
        counts={"": sum(counts.values())}
        | {name: sum(counts[each] for each in group) for name, group in STATUS_GROUPS.items()},
        given=given,
        link=link,
        next_page=_address(given | {"cursor": found.next_cursor}) if found.next_cursor else None,
        is_first_page=not cursor,
        is_filtered=any(filters.values()),
        columns=shown,
        sort_link=lambda column: run_columns.sort_link(column, order or _NEWEST, link),
        suggestions=[]
        if is_update  # it replaces the list only
        else run_columns.suggestions(found.items, list(specs.values())),
        known_columns=run_columns,
        usage_parts=cli_words.usage_parts,
        progress_share=progress_share,
    )


async def _specs(context: ApiContext, runs: tuple[Run, ...]) -> dict[str, dict[str, Any]]:
    """Return the spec of each run by its id."""
    rows = await context.database_call(context.runs.rows, [run.id for run in runs])
    return {run_id: row.spec for run_id, row in rows.items()}


def _written(columns: tuple[run_columns.Column, ...]) -> str:
    """Return the columns as the URL has them; empty for the default ones."""
    keys = tuple(column.key for column in columns)
    return "" if keys == run_columns.DEFAULT else ",".join(keys)


def _address(values: dict[str, Any]) -> str:
    query = urlencode({name: value for name, value in values.items() if value})
    return f"/runs?{query}" if query else "/runs"


# ---------------------------------------------------------------- selected runs

# What is done with several runs of the list at once: compare, cancel, delete.

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
            problem: ApiProblem = as_problem(exc)
            if problem.status >= 500 and not isinstance(exc, ApiProblem):
                raise
            refused.append((run_id, problem.detail))
        finally:
            begin_entry(call)
    return refused
