"""The caller's own page: rights, sessions, personal tokens."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import TypeAdapter, ValidationError

from everstep.wire.team import TokenName
from service.api.blocking import db_read, db_write
from service.api.callers import Principal
from service.api.dependencies import Sessions, Tokens
from service.api.problems import ApiProblem, invalid_request, not_found
from service.db.tokens import SessionStore, TokenStore, sha256_of
from service.model.rows import RANK, SessionRow, TokenKind, TokenRow, maybe_time, to_time
from service.web.rendering import PageRoute, page
from service.web.session import CheckedForm, WebCaller, cookie_of

router: Final = APIRouter(prefix="/account", route_class=PageRoute, include_in_schema=False)

LONGEST_DAYS: Final = 90
"""Longest life of a personal token: the rights behind it are read again at a log-in only."""
_DAYS: Final = (7, 30, LONGEST_DAYS)
_LABEL: Final[TypeAdapter[str]] = TypeAdapter(TokenName)


async def session_token(request: Request, sessions: Sessions, _caller: WebCaller) -> TokenRow:
    """Return the token that this browser's session stands for."""
    found = await db_read(sessions.find, cookie_of(request))
    if found is None:
        raise ApiProblem(401, "unauthorized", "The session has just ended; log in again.")
    return found


SessionToken = Annotated[TokenRow, Depends(session_token)]


@router.get("")
async def get_account(
    request: Request, sessions: Sessions, tokens: Tokens, caller: WebCaller, token: SessionToken
) -> Response:
    """Show the caller's rights, sessions and personal tokens."""
    return await _account(request, sessions, tokens, caller, token)


async def _account(
    request: Request,
    sessions: SessionStore,
    tokens: TokenStore,
    caller: Principal,
    token: TokenRow,
    made: str | None = None,
) -> Response:
    here = sha256_of(cookie_of(request))
    held = await db_read(sessions.valid, caller.holder)
    grants, personal = [], []
    if token.kind == "log_in":
        grants = await _tokens_of(tokens, token, "log_in")
        personal = await _tokens_of(tokens, token, "personal")
    return page(
        request,
        "account.html",
        caller,
        token=token,
        grants=grants,
        personal=[(row, maybe_time(row.expires_at)) for row in personal],
        sessions=[_shown(row, here) for row in held],
        roles=[role for role in RANK if RANK[role] <= RANK[token.role]],
        days=_DAYS,
        made=made,
    )


def _shown(row: SessionRow, here: str) -> dict[str, object]:
    return {
        "row": row,
        "is_here": row.sha256 == here,
        "created_at": to_time(row.created_at),
        "expires_at": to_time(row.expires_at),
    }


@router.post("/rights")
async def post_rights(
    request: Request,
    sessions: Sessions,
    tokens: Tokens,
    form: CheckedForm,
    token: SessionToken,
) -> Response:
    """Use other rights of the same user in this session, such as another project."""
    mine = await _tokens_of(tokens, token, "log_in") if token.kind == "log_in" else []
    chosen = next((row for row in mine if row.id == form.get("token_id")), None)
    if chosen is None:
        raise not_found("these rights are not yours any more; log in again")
    await db_write(sessions.switch, cookie_of(request), chosen)
    return RedirectResponse("/account", 303)


async def _tokens_of(store: TokenStore, session: TokenRow, kind: TokenKind) -> list[TokenRow]:
    """Return the tokens of a session's user; none if an administrator made its token."""
    if session.user_id is None:
        return []
    return await db_read(store.of_user, session.user_id, kind)


@router.post("/sessions/end")
async def post_end_session(
    request: Request, sessions: Sessions, caller: WebCaller, form: CheckedForm
) -> Response:
    """End one of the caller's sessions, or all but this one."""
    session_id = form.get("session_id")
    if session_id:
        await db_write(sessions.end_by_id, session_id, caller.holder)
    else:
        await db_write(sessions.end_others, cookie_of(request), caller.holder)
    return RedirectResponse("/account", 303)


@router.post("/tokens")
async def post_token(
    request: Request,
    sessions: Sessions,
    tokens: Tokens,
    caller: WebCaller,
    form: CheckedForm,
    token: SessionToken,
) -> Response:
    """Make a personal token with at most the rights of this session, and show it once."""
    if token.kind != "log_in":
        raise ApiProblem(
            403,
            "forbidden",
            "This session began with a token. Log in at the identity provider, or ask an "
            "administrator for another token.",
        )
    role = next((each for each in RANK if each == form.get("role")), None)
    days = int(form["days"]) if form.get("days", "").isdecimal() else 0
    try:
        label = _LABEL.validate_python(form.get("label", "").strip())
    except ValidationError:
        raise invalid_request("label", msg="name the token with 1 to 128 characters") from None
    if role is None or RANK[role] > RANK[token.role]:
        raise invalid_request("role", msg=f"choose at most your own role, {token.role}")
    if not 1 <= days <= LONGEST_DAYS:
        raise invalid_request("days", msg=f"choose 1 to {LONGEST_DAYS} days")
    expires_at = tokens.clock() + days * 86400
    _, secret = await db_write(tokens.create_personal, token, label, role, expires_at)
    return await _account(request, sessions, tokens, caller, token, secret)


@router.post("/tokens/revoke")
async def post_revoke(tokens: Tokens, form: CheckedForm, token: SessionToken) -> Response:
    """Revoke a personal token of the caller."""
    mine = await _tokens_of(tokens, token, "personal")
    token_id = form.get("token_id", "")
    if token_id not in {row.id for row in mine}:
        raise not_found("this token is not yours, or is already revoked")
    await db_write(tokens.revoke, token_id)
    return RedirectResponse("/account", 303)
