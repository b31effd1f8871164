"""Log in at the operator's identity provider: there and back."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import structlog
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy import Column, Connection, Double, String, Table, UniqueConstraint, insert, update

from service.annexes.access.provider import (
    CALLBACK_PATH,
    FLOW_LASTS_S,
    Flow,
    LogInRefused,
    Provider,
    ProviderUnavailable,
)
from service.api.blocking import db_write
from service.api.dependencies import Sessions, TheDatabase
from service.api.problems import not_found
from service.db.engine import Store, insert_into
from service.db.ids import random_id
from service.db.projects import ensure_project
from service.db.tables import metadata, tokens
from service.db.tokens import SECRET_BYTES, sha256_of
from service.model.operator_rules import Grant
from service.model.rows import StoredRow, TokenRow
from service.parts import parts_of
from service.web.dashboard import log_in_form
from service.web.rendering import PageRoute
from service.web.session import begin_session, is_secure, local_path

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)
log = structlog.get_logger("everstep")

FLOW_COOKIE: Final = "everstep_flow"

_FIRST_PAGE: Final = local_path(None)


async def provider_of(request: Request) -> Provider:
    """Return the identity provider. Raises 404 if this service has none."""
    found = parts_of(request).find(Provider)
    if found is None:
        raise not_found("this service has no identity provider; log in with a token at /login")
    return found


TheProvider = Annotated[Provider, Depends(provider_of)]


def _cookie_name(request: Request) -> str:
    return f"__Host-{FLOW_COOKIE}" if is_secure(request) else FLOW_COOKIE


@router.get("/login/oidc")
async def get_log_in_at_provider(
    request: Request,
    provider: TheProvider,
    next: Annotated[str | None, Query(max_length=2000)] = None,
) -> Response:
    """Send the browser to the provider, with the secrets of this log-in in a cookie."""
    flow = Flow.new(local_path(next))
    try:
        response = RedirectResponse(await provider.address(flow), 303)
    except ProviderUnavailable as exc:
        return _refused(request, flow.target, exc, 503)
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
async def get_back_from_provider(
    request: Request, provider: TheProvider, users: Users, sessions: Sessions
) -> Response:
    """Take the provider's answer: begin a session, or say why not. The cookie works once."""
    flow = Flow.read(request.cookies.get(_cookie_name(request), ""))
    target = local_path(flow.target) if flow else _FIRST_PAGE
    try:
        if flow is None:
            raise LogInRefused("this log-in was not begun in this browser, or took too long")
        token = await _logged_in(users, provider, flow, request)
        response: Response = RedirectResponse(target, 303)
        await begin_session(request, response, sessions, token.id, provider.rule.lasts_s)
    except LogInRefused as exc:
        response = _refused(request, target, exc, 403)
    except ProviderUnavailable as exc:
        response = _refused(request, target, exc, 503)
    response.delete_cookie(
        _cookie_name(request), path="/", secure=is_secure(request), httponly=True, samesite="lax"
    )
    return response


async def _logged_in(
    users: UserStore, provider: Provider, flow: Flow, request: Request
) -> TokenRow:
    """Return the token of the user's highest rights. Raises LogInRefused for someone without
    rights, whose earlier ones are then revoked."""
    rule = provider.rule
    identity = await provider.identity(flow, request.query_params)
    grants = rule.grants.grants(identity.groups)
    tokens = await db_write(
        users.log_in,
        rule.issuer,
        identity.subject,
        identity.name,
        grants,
    )
    if not tokens:
        named = ", ".join(identity.groups[:20]) or "none"
        raise LogInRefused(
            f"{identity.name} has no rights here (groups: {named}); ask the operator to add one of "
            "them to EVERSTEP_OIDC_GRANTS, or the identity provider to put you into one"
        )
    log.info("user logged in", user=identity.name, role=tokens[0].role, project=tokens[0].project)
    return tokens[0]


def _refused(request: Request, target: str, why: Exception, status: int) -> Response:
    log.warning("log-in refused", problem=str(why), status=status)
    problem = f"Not logged in: {why}."
    return log_in_form(request, target, problem, status)


# ---------------------------------------------------------------- users

# People who logged in at an identity provider, and the tokens of their rights.


class UserStore(Store):
    """Users by issuer and subject."""

    def log_in(
        self, issuer: str, subject: str, name: str, grants: Sequence[Grant]
    ) -> list[TokenRow]:
        """Record a user's log-in and their rights; return a token for each grant, in its order.

        Rights that the user no longer has are revoked: their tokens, the sessions with them, and
        personal tokens that no grant covers. Nobody has the secret of a returned token.

        Args:
            issuer: URL of the identity provider.
            subject: the user's id there.
            name: e-mail address.
            grants: the user's rights; none revokes everything.
        """
        with self._database.write() as connection:
            user = self._recorded(connection, issuer, subject, name)
            held = self._valid_tokens(connection, user.id)
            self._revoke(connection, [row.id for row in held if not _is_covered(row, grants)])
            self._rename(connection, user)
            current = {Grant(row.role, row.project): row for row in held if row.kind == "log_in"}
            return [
                current.get(grant) or self._new_token(connection, user, grant) for grant in grants
            ]

    def _recorded(self, connection: Connection, issuer: str, subject: str, name: str) -> UserRow:
        """Insert or refresh the user's row, which stays locked until the transaction ends."""
        now = self.clock()
        row = UserRow(random_id("user"), issuer, subject, name, now, now)
        connection.execute(
            insert_into(users, connection.dialect)
            .values(row.columns())
            .on_conflict_do_update(
                index_elements=["issuer", "subject"], set_={"name": name, "seen_at": now}
            )
        )
        query = UserRow.select(users).where(users.c.issuer == issuer, users.c.subject == subject)
        return UserRow(*connection.execute(query).one())

    def _valid_tokens(self, connection: Connection, user_id: str) -> list[TokenRow]:
        query = (
            TokenRow.select(tokens)
            .where(tokens.c.user_id == user_id, tokens.c.revoked_at.is_(None))
            .order_by(tokens.c.created_at, tokens.c.id)
        )
        return [TokenRow(*row) for row in connection.execute(query)]

    def _revoke(self, connection: Connection, token_ids: Iterable[str]) -> None:
        lost = list(token_ids)
        if lost:
            connection.execute(
                update(tokens).where(tokens.c.id.in_(lost)).values(revoked_at=self.clock())
            )

    def _rename(self, connection: Connection, user: UserRow) -> None:
        """Let the user's tokens carry the address of this log-in."""
        mine = tokens.c.user_id == user.id
        connection.execute(update(tokens).where(mine).values(owner=user.name))
        connection.execute(
            update(tokens).where(mine, tokens.c.kind == "log_in").values(name=user.name)
        )

    def _new_token(self, connection: Connection, user: UserRow, grant: Grant) -> TokenRow:
        now = self.clock()
        if grant.project is not None:
            ensure_project(connection, grant.project, now, create=True)
        row = TokenRow(
            id=random_id("tok"),
            name=user.name,
            role=grant.role,
            project=grant.project,
            sha256=sha256_of(secrets.token_urlsafe(SECRET_BYTES)),
            created_at=now,
            user_id=user.id,
            owner=user.name,
            kind="log_in",
        )
        connection.execute(insert(tokens), row.columns())
        return row


async def user_store(database: TheDatabase, sessions: Sessions) -> UserStore:
    return UserStore(database, sessions.clock)


Users = Annotated[UserStore, Depends(user_store)]


def _is_covered(row: TokenRow, grants: Sequence[Grant]) -> bool:
    """Return whether the user may keep a token: a log-in's if it is one of the grants, a personal
    one if a grant includes its rights."""
    if row.kind == "log_in":
        return Grant(row.role, row.project) in grants
    return any(grant.covers(row.role, row.project) for grant in grants)


users = Table(  # people who logged in at an identity provider
    "users",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("issuer", String(512), nullable=False),
    Column("subject", String(255), nullable=False),
    Column("name", String(128), nullable=False),  # e-mail address as of the last log-in
    Column("created_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),  # last log-in
    UniqueConstraint("issuer", "subject"),
)


@dataclass(frozen=True, slots=True)
class UserRow(StoredRow):
    """A person as an identity provider knows them; ``name`` is their e-mail address."""

    id: str
    issuer: str
    subject: str
    name: str
    created_at: float
    seen_at: float
