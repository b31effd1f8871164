"""Log in with a token or at the operator's identity provider, and log out."""

from __future__ import annotations

from typing import Annotated, Final

import structlog
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import RedirectResponse

from service.api.context import ApiContext, Context
from service.api.problems import ProblemError, not_found
from service.identity import (
    CALLBACK_PATH,
    FLOW_LASTS_S,
    Flow,
    LogInRefused,
    Provider,
    ProviderUnavailable,
)
from service.model.rows import TokenRow
from service.web.rendering import PageRoute, page
from service.web.session import (
    CheckedForm,
    begin_session,
    cookie_of,
    is_secure,
    local_path,
    log_in,
    log_out_of_browser,
    read_form,
)

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/")
async def get_first_page() -> Response:
    return RedirectResponse("/runs", 303)


@router.get("/login")
async def get_log_in(
    request: Request,
    context: Context,
    next: str | None = None,
    code: Annotated[str | None, Query(max_length=200)] = None,
) -> Response:
    """Show the form, or log in by the code of a link that `everstep serve` printed."""
    target, problem = local_path(next), None
    if code is not None:
        token_id = context.log_in_codes.take(code)
        if token_id is not None:
            response = RedirectResponse(target, 303)
            await begin_session(request, response, context, token_id)
            return response
        problem = "This link was used already, or is too old. Enter a token."
    return log_in_form(request, context, target, problem)


@router.post("/login")
async def post_log_in(
    request: Request, context: Context, form: Annotated[dict[str, str], Depends(read_form)]
) -> Response:
    secret, target = form.get("token", "").strip(), local_path(form.get("next"))
    response = RedirectResponse(target, 303)
    try:
        await log_in(request, response, context, secret)
    except ProblemError as exc:
        if exc.status != 401:
            raise
        problem = (
            "This token is not valid (unknown, expired or revoked). Enter another one."
            if secret
            else "Enter a token."
        )
        return log_in_form(request, context, target, problem, 401)
    return response


def log_in_form(
    request: Request, context: ApiContext, target: str, problem: str | None, status: int = 200
) -> Response:
    """Return the page with each way to log in."""
    provider = context.provider.rule.label if context.provider else None
    return page(
        request, "login.html", None, status, target=target, problem=problem, provider=provider
    )


@router.post("/logout")
async def post_log_out(request: Request, context: Context, _form: CheckedForm) -> Response:
    """End the session, wherever its cookie was copied to."""
    await context.database_call(context.sessions.end, cookie_of(request))
    response = RedirectResponse("/login", 303)
    log_out_of_browser(request, response)
    return response


# ---------------------------------------------------------------- single sign on

# Log in at the operator's identity provider: there and back.

log = structlog.get_logger("everstep")

FLOW_COOKIE: Final = "everstep_flow"
_FIRST_PAGE: Final = local_path(None)


def _provider(context: ApiContext) -> Provider:
    if context.provider is None:
        raise not_found("this service has no identity provider; log in with a token at /login")
    return context.provider


def _cookie_name(request: Request) -> str:
    return f"__Host-{FLOW_COOKIE}" if is_secure(request) else FLOW_COOKIE


@router.get("/login/oidc")
async def get_log_in_at_provider(
    request: Request,
    context: Context,
    next: Annotated[str | None, Query(max_length=2000)] = None,
) -> Response:
    """Send the browser to the provider, with the secrets of this log-in in a cookie."""
    provider = _provider(context)
    flow = Flow.new(local_path(next))
    try:
        response = RedirectResponse(await provider.address(flow), 303)
    except ProviderUnavailable as exc:
        return _refused(request, context, flow.target, exc, 503)
    response.set_cookie(
        _cookie_name(request),
        flow.cookie(),
        max_age=FLOW_LASTS_S,
        path="/",
        secure=is_secure(request),
        httponly=True,
        samesite="lax",
    )
    return response


@router.get(CALLBACK_PATH)
async def get_back_from_provider(request: Request, context: Context) -> Response:
    """Take the provider's answer: begin a session, or say why not. The cookie works once."""
    provider = _provider(context)
    flow = Flow.read(request.cookies.get(_cookie_name(request), ""))
    target = local_path(flow.target) if flow else _FIRST_PAGE
    try:
        if flow is None:
            raise LogInRefused("this log-in was not begun in this browser, or took too long")
        token = await _logged_in(context, provider, flow, request)
        response: Response = RedirectResponse(target, 303)
        await begin_session(request, response, context, token.id, provider.rule.lasts_s)
    except LogInRefused as exc:
        response = _refused(request, context, target, exc, 403)
    except ProviderUnavailable as exc:
        response = _refused(request, context, target, exc, 503)
    response.delete_cookie(
        _cookie_name(request), path="/", secure=is_secure(request), httponly=True, samesite="lax"
    )
    return response


async def _logged_in(
    context: ApiContext, provider: Provider, flow: Flow, request: Request
) -> TokenRow:
    """Return the token of the user's highest rights. Raises LogInRefused for someone without
    rights, whose earlier ones are then revoked."""
    rule = provider.rule
    identity = await provider.identity(flow, request.query_params)
    grants = rule.grants.grants(identity.groups)
    tokens = await context.database_call(
        context.users.log_in, rule.issuer, identity.subject, identity.name, grants
    )
    if not tokens:
        named = ", ".join(identity.groups[:20]) or "none"
        raise LogInRefused(
            f"{identity.name} has no rights here (groups: {named}); ask the operator to add one of "
            "them to EVERSTEP_OIDC_GRANTS, or the identity provider to put you into one"
        )
    log.info("user logged in", user=identity.name, role=tokens[0].role, project=tokens[0].project)
    return tokens[0]


def _refused(
    request: Request, context: ApiContext, target: str, why: Exception, status: int
) -> Response:
    log.warning("log-in refused", problem=str(why), status=status)
    problem = f"Not logged in: {why}."
    return log_in_form(request, context, target, problem, status)
