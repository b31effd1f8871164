"""The door of the dashboard: all pages, mounted on the application; log in, and log out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Final

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException

from service.annex import Annex
from service.api.blocking import db_write
from service.api.dependencies import Codes, Sessions, TheDoor
from service.api.problems import ApiProblem, problem_of_request, problem_response
from service.db.engine import DatabaseUnavailable
from service.web import assets, cluster, code_page, compare, logs, new_run, run_list, run_page
from service.web.rendering import PageRoute, page, problem_page
from service.web.session import (
    CheckedForm,
    begin_session,
    cookie_of,
    local_path,
    log_in,
    log_out_of_browser,
    read_form,
    web_caller,
)


def install(app: FastAPI, annexes: Sequence[Annex]) -> None:
    """Add every page, those of annexes first: a page of a run takes any word behind its address.
    Pages are not part of the API in OpenAPI."""
    for each in (
        *(pages for annex in annexes for pages in annex.pages),
        assets.router,
        new_run.router,
        router,
        run_list.router,
        compare.router,
        code_page.router,
        logs.router,
        run_page.router,
        cluster.router,
    ):
        app.include_router(each)
    app.add_exception_handler(HTTPException, _answer_unserved)


async def _answer_unserved(request: Request, exc: Exception) -> Response:
    """Answer a path that no route serves: a browser gets a page, with the navigation for whoever is
    logged in; a program gets a problem."""
    problem = problem_of_request(request, exc)
    if "text/html" in request.headers.get("accept", ""):
        with suppress(ApiProblem, DatabaseUnavailable):
            await web_caller(request)
        return problem_page(request, problem)
    return problem_response(problem)


# ---------------------------------------------------------------- log in

# Log in with a token, and log out.

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/")
async def get_first_page() -> Response:
    return RedirectResponse("/runs", 303)


@router.get("/login")
async def get_log_in(
    request: Request,
    codes: Codes,
    sessions: Sessions,
    next: str | None = None,
    code: Annotated[str | None, Query(max_length=200)] = None,
) -> Response:
    """Show the form, or log in by the code of a link that `everstep serve` printed."""
    target, problem = local_path(next), None
    if code is not None:
        token_id = codes.take(code)
        if token_id is not None:
            response = RedirectResponse(target, 303)
            await begin_session(request, response, sessions, token_id)
            return response
        problem = "This link was used already, or is too old. Enter a token."
    return log_in_form(request, target, problem)


@router.post("/login")
async def post_log_in(
    request: Request,
    door: TheDoor,
    sessions: Sessions,
    form: Annotated[dict[str, str], Depends(read_form)],
) -> Response:
    secret, target = form.get("token", "").strip(), local_path(form.get("next"))
    response = RedirectResponse(target, 303)
    try:
        await log_in(request, response, door, sessions, secret)
    except ApiProblem as exc:
        if exc.status != 401:
            raise
        problem = (
            "This token is not valid (unknown, expired or revoked). Enter another one."
            if secret
            else "Enter a token."
        )
        return log_in_form(request, target, problem, 401)
    return response


def log_in_form(request: Request, target: str, problem: str | None, status: int = 200) -> Response:
    """Return the page with each way to log in."""
    return page(request, "login.html", None, status, target=target, problem=problem)


@router.post("/logout")
async def post_log_out(request: Request, sessions: Sessions, _form: CheckedForm) -> Response:
    """End the session, wherever its cookie was copied to."""
    await db_write(sessions.end, cookie_of(request))
    response = RedirectResponse("/login", 303)
    log_out_of_browser(request, response)
    return response
