"""Log in at the operator's identity provider: there and back."""

from __future__ import annotations

from typing import Annotated, Final

import structlog
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from service.api.context import ApiContext, Context
from service.api.problems import not_found
from service.identity.flow import LASTS_S, Flow
from service.identity.problems import LogInRefused, ProviderUnavailable
from service.identity.provider import CALLBACK_PATH, Provider
from service.model.rows import TokenRow
from service.web.log_in_page import log_in_form
from service.web.rendering import PageRoute
from service.web.session import begin_session, is_secure, local_path

log = structlog.get_logger("everstep")
router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

COOKIE: Final = "everstep_flow"
_FIRST_PAGE: Final = local_path(None)


def _provider(context: ApiContext) -> Provider:
    if context.provider is None:
        raise not_found("this service has no identity provider; log in with a token at /login")
    return context.provider


def _cookie_name(request: Request) -> str:
    return f"__Host-{COOKIE}" if is_secure(request) else COOKIE


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
        max_age=LASTS_S,
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
