"""The dashboard: all pages, mounted on the application."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from service.api.problems import problem_of_request, problem_response
from service.web import (
    account,
    assets,
    cluster,
    compare,
    log_in,
    logs,
    new_run,
    run_list,
    run_page,
    sweep_pages,
)
from service.web.rendering import problem_page


def install(app: FastAPI) -> None:
    """Add every page. Pages are not part of the API in OpenAPI."""
    for router in (
        assets.router,
        new_run.router,
        log_in.router,
        account.router,
        run_list.router,
        sweep_pages.router,
        compare.router,
        logs.router,
        run_page.router,
        cluster.router,
        account.alerts_router,
    ):
        app.include_router(router)
    app.add_exception_handler(HTTPException, _answer_unserved)


async def _answer_unserved(request: Request, exc: Exception) -> Response:
    """Answer a path that no route serves: a browser gets a page, a program a problem."""
    problem = problem_of_request(request, exc)
    if "text/html" in request.headers.get("accept", ""):
        return problem_page(request, problem)
    return problem_response(problem)
