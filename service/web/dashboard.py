"""The dashboard: all pages, mounted on the application."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from service.api.problems import problem_of_request, problem_response
from service.web import (
    account_page,
    alerts_page,
    assets,
    cluster_pages,
    compare_page,
    curve_table,
    events_page,
    log_in_page,
    log_page,
    new_run_page,
    ray_pages,
    reference,
    run_list,
    run_pages,
    selected_runs,
    single_sign_on,
    sweep_pages,
)
from service.web.rendering import problem_page


def install(app: FastAPI) -> None:
    """Add every page. Pages are not part of the API in OpenAPI."""
    for module in (
        assets,
        reference,
        log_in_page,
        single_sign_on,
        account_page,
        run_list,
        sweep_pages,
        selected_runs,
        compare_page,
        curve_table,
        events_page,
        log_page,
        new_run_page,
        run_pages,
        cluster_pages,
        alerts_page,
        ray_pages,
    ):
        app.include_router(module.router)
    app.add_exception_handler(HTTPException, _answer_unserved)


async def _answer_unserved(request: Request, exc: Exception) -> Response:
    """Answer a path that no route serves: a browser gets a page, a program a problem."""
    problem = problem_of_request(request, exc)
    if "text/html" in request.headers.get("accept", ""):
        return problem_page(request, problem)
    return problem_response(problem)
