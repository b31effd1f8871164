"""Callers: whom a token or a session stands for, and what is remembered of them between requests:
the last use of tokens, codes of log-ins, and how often they may ask."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog
from fastapi import Request

from everstep.options.serve import DEFAULT_RATE_PER_S
from service.api.blocking import db_read, db_write
from service.api.problems import ApiProblem
from service.db.audit import current_entry
from service.db.engine import DatabaseError
from service.db.tokens import Holder, SessionStore, TokenStore, sha256_of
from service.model.rows import RANK, Role, TokenRow


@dataclass(frozen=True)
class Principal:
    """The caller that a valid token stands for."""

    token_id: str
    name: str
    role: Role
    project: str | None
    """The one project that it has access to; None for all."""
    sha256: str
    """SHA-256 of the secret in the request: a token, or a browser session."""
    by_session: bool = False
    owner: str = ""
    """Who owns what the caller creates: a user's e-mail address, or the token's name."""
    user_id: str | None = None
    """The user, if one logged in or made the token; None for an administrator's token."""

    @property
    def holder(self) -> Holder:
        """Whose sessions are the caller's own."""
        return Holder(self.token_id, self.user_id)

    def reaches(self, project: str) -> bool:
        return self.project is None or self.project == project

    def may(self, role: Role) -> bool:
        """Return whether its role includes the rights of ``role``."""
        return RANK[self.role] >= RANK[role]

    def require(self, role: Role) -> None:
        """Raise 403 for a lesser role."""
        if not self.may(role):
            raise ApiProblem(
                403,
                "forbidden",
                f"this needs the role {role}, but token {self.name!r} is a {self.role}; use "
                "another token",
            )


# ---------------------------------------------------------------- token use

# When tokens were last used. Uses are collected and written every few seconds, so that reads cause
# no writes.

logger = structlog.get_logger(__name__)

FLUSH_S: Final = 5.0


class TokenUse:
    """Uses that are not in the database yet. ``clock`` returns unix seconds."""

    def __init__(self, tokens: TokenStore, clock: Callable[[], float]) -> None:
        self._tokens = tokens
        self._clock = clock
        self._used_at: dict[str, float] = {}

    def note(self, token_id: str) -> None:
        self._used_at[token_id] = self._clock()

    async def flush(self) -> None:
        """Write the collected uses. Keep them for the next flush if the database is away."""
        used_at, self._used_at = self._used_at, {}
        if not used_at:
            return
        try:
            await db_write(self._tokens.note_used, used_at)
        except DatabaseError as exc:
            self._used_at = used_at | self._used_at
            logger.warning("recording token use delayed", problem=str(exc))

    async def run(self) -> None:
        """Flush every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()


# ---------------------------------------------------------------- log in codes

# Codes of links that log a browser in: each works once, for a few minutes, in this process
# only.

VALID_S: Final = 600.0
_RANDOM_BYTES: Final = 32


class LogInCodes:
    """The codes that were made and not used. ``clock`` returns unix seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._codes: dict[str, tuple[str, float]] = {}

    def make(self, token_id: str) -> str:
        """Return a code that stands for a token."""
        code = secrets.token_urlsafe(_RANDOM_BYTES)
        self._codes[sha256_of(code)] = token_id, self._clock() + VALID_S
        return code

    def take(self, code: str) -> str | None:
        """Return the id of a code's token, and forget the code; None if it is not valid."""
        token_id, ends_at = self._codes.pop(sha256_of(code), ("", 0.0))
        return token_id if self._clock() < ends_at else None


# ---------------------------------------------------------------- rate limit

# Rate limit per token: a token bucket that fills steadily, and from which each request takes
# one.

BURST_S: Final = 2.0
"""Requests worth this many seconds may come at once."""
_MAX_TOKENS: Final = 10_000
"""Maximum number of buckets; the least recently used are dropped, and start full again."""


class RateLimit:
    """The buckets of one process.

    Args:
        rate_per_s: sustained requests per second of each token; 0 is no limit.
        monotonic: monotonic clock in seconds.
    """

    def __init__(
        self,
        rate_per_s: float = DEFAULT_RATE_PER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, rate_per_s * BURST_S)
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By token id: level, and when it was computed."""

    def wait_s(self, token_id: str) -> int:
        """Take one request. Return 0 if it may be served, else the whole seconds to wait."""
        if self._rate_per_s <= 0:
            return 0
        now = self._monotonic()
        level, at = self._buckets.pop(token_id, (self._burst, now))
        level = min(self._burst, level + (now - at) * self._rate_per_s)
        served = level >= 1.0
        self._buckets[token_id] = (level - 1.0 if served else level, now)
        if len(self._buckets) > _MAX_TOKENS:
            self._buckets.popitem(last=False)
        return 0 if served else max(1, math.ceil((1.0 - level) / self._rate_per_s))


# ---------------------------------------------------------------- door


class Door:
    """Finds the caller of a request, within the rate limit, and notes the use of their token."""

    def __init__(
        self, tokens: TokenStore, sessions: SessionStore, use: TokenUse, rate_limit: RateLimit
    ) -> None:
        self._tokens = tokens
        self._sessions = sessions
        self._use = use
        self.rate_limit = rate_limit

    async def by_token(self, request: Request, secret: str) -> Principal:
        """Return the caller whose token this is. Raises 401 if it is not valid, 429 above the rate
        limit."""
        known = secret if secret.isascii() else ""
        found = await db_read(self._tokens.find, known) if known else None
        return self._admitted(request, found)

    async def by_session(self, request: Request, secret: str) -> Principal:
        """Return who is logged in with this cookie. Raises as ``by_token``."""
        found = await db_read(self._sessions.find, secret) if secret else None
        return self._admitted(request, found, sha256_of(secret))

    def _admitted(
        self, request: Request, found: TokenRow | None, session: str | None = None
    ) -> Principal:
        """Return the caller for a token, which the browser session with this SHA-256 led to, and
        record the call."""
        if found is None:
            detail = (
                "no valid token; send Authorization: Bearer TOKEN (on the service's machine: the "
                "content of $EVERSTEP_HOME/token)"
            )
            raise ApiProblem(401, "unauthorized", detail, headers={"WWW-Authenticate": "Bearer"})
        wait_s = self.rate_limit.wait_s(found.id)
        if wait_s:
            detail = f"token {found.name!r} exceeds its rate limit; try again in {wait_s} s"
            raise ApiProblem(429, "rate_limited", detail, headers={"Retry-After": str(wait_s)})
        self._use.note(found.id)
        entry = current_entry()
        if entry is not None:
            entry.token_id, entry.token_name, entry.role = found.id, found.name, found.role
            entry.status = getattr(request.scope.get("route"), "status_code", None) or 200
            entry.target = request.path_params.get("run_id") or request.path_params.get("node_id")
        return Principal(
            found.id,
            found.name,
            found.role,
            found.project,
            session or found.sha256,
            session is not None,
            found.owner or found.name,
            found.user_id,
        )
