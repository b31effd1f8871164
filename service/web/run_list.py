"""The page *runs*: a live list with search and filters."""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from everstep.wire import RunStatus
from service.api.context import Context
from service.api.run_list import found_runs, parse_tag
from service.db.run_lookup import RunFilter
from service.web.formatting import STATUS_GROUPS, progress_share
from service.web.rendering import PageRoute, page
from service.web.session import WebCaller

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

_PAGE_RUNS: Final = 50


@router.get("/runs")
async def get_runs(
    request: Request,
    context: Context,
    caller: WebCaller,
    search: Annotated[str, Query(max_length=128)] = "",
    status: Annotated[str, Query(max_length=16)] = "",
    project: Annotated[str, Query(max_length=64)] = "",
    tag: Annotated[str, Query(max_length=400)] = "",
    cursor: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    search = search.strip()
    tags = (parse_tag(tag),) if tag else ()
    statuses = STATUS_GROUPS.get(status, (RunStatus(status),) if status in set(RunStatus) else ())
    wanted = RunFilter(
        project=project or None, statuses=tuple(statuses), search=search or None, tags=tags
    )
    found = await found_runs(context, caller, wanted, _PAGE_RUNS, cursor or None)
    where = RunFilter(project=caller.project or project or None, search=search or None, tags=tags)
    counts = await context.database_call(context.runs.count_by_status, where)
    given = {"search": search, "status": status, "project": project, "tag": tag}

    def link(**changes: str | None) -> str:
        """Return the URL of this page with other filters, from its first run."""
        return _address(given | changes)

    return page(
        request,
        "runs.html",
        caller,
        runs=found.items,
        counts={"": sum(counts.values())}
        | {name: sum(counts[each] for each in group) for name, group in STATUS_GROUPS.items()},
        given=given,
        link=link,
        next_page=_address(given | {"cursor": found.next_cursor}) if found.next_cursor else None,
        is_first_page=not cursor,
        is_filtered=any(given.values()),
        progress_share=progress_share,
    )


def _address(values: dict[str, Any]) -> str:
    query = urlencode({name: value for name, value in values.items() if value})
    return f"/runs?{query}" if query else "/runs"
