"""Compare several runs: figures, differences of their specs, curves. And one run's spec with
another's."""

from __future__ import annotations

import json
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from everstep.text.differences import differences
from service.api.auth import Principal, visible_run
from service.api.context import ApiContext, Context
from service.api.problems import ProblemError
from service.api.runs import run_answers
from service.db.run_lookup import RunFilter
from service.model.run_rows import RunRow
from service.web import parallel
from service.web.rendering import PageRoute, page
from service.web.run_pages import run_page
from service.web.session import WebCaller, WebRun

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

MOST_RUNS: Final = 8
_SUGGESTED: Final = 30


@router.get("/compare")
async def get_comparison(
    request: Request,
    context: Context,
    caller: WebCaller,
    run: Annotated[list[str] | None, Query()] = None,
) -> Response:
    """Show the runs in ``run``, each once."""
    ids = list(dict.fromkeys(run_id.strip() for run_id in run or () if run_id.strip()))
    if len(ids) > MOST_RUNS:
        raise ProblemError(
            422,
            "invalid_request",
            f"Cannot compare {len(ids)} runs; choose at most {MOST_RUNS}.",
        )
    rows = [await visible_run(run_id, context, caller) for run_id in ids]
    runs = await run_answers(context, rows)
    return page(
        request,
        "compare.html",
        caller,
        runs=runs,
        metrics=sorted({name for each in runs for name in each.metrics}),
        differences=differences([row.spec for row in rows]),
        parallel=parallel.picture(runs, [row.spec for row in rows]),
        suggested=await suggested(context, caller),
        most=MOST_RUNS,
    )


@router.get("/runs/{run_id}/spec")
async def get_spec(
    request: Request,
    run: WebRun,
    context: Context,
    caller: WebCaller,
    against: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """Show the resolved spec, and its differences from another run's."""
    other = await visible_run(against.strip(), context, caller) if against.strip() else None
    return await run_page(
        request,
        "spec.html",
        context,
        caller,
        run,
        text=json.dumps(run.spec, indent=2, ensure_ascii=False),
        other=other,
        differences=differences([run.spec, other.spec]) if other else [],
        suggested=[each for each in await suggested(context, caller) if each.id != run.id],
    )


async def suggested(context: ApiContext, caller: Principal) -> list[RunRow]:
    """Return the newest runs that the caller can see, as suggestions to compare with."""
    return await context.database_call(
        context.runs.find, RunFilter(project=caller.project), _SUGGESTED
    )
