"""Browser sessions: a random cookie, stored as its SHA-256, that stands for a token until either
ends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Final

from sqlalchemy import bindparam, delete, insert, or_, select

from service.db.engine import Database
from service.db.tables import sessions, tokens
from service.db.tokens import sha256_of, valid_digests
from service.model.rows import TokenRow

LASTS_S: Final = 30 * 24 * 3600.0
_MOST_OF_A_TOKEN: Final = 100
"""Maximum number of sessions of a token; a further log-in ends the oldest."""
_RANDOM_BYTES: Final = 32
_VALID: Final = (
    sessions.c.token_id == tokens.c.id,
    sessions.c.expires_at > bindparam("now"),
    tokens.c.revoked_at.is_(None),
    or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > bindparam("now")),
)
_TOKEN_OF: Final = TokenRow.select(tokens).where(sessions.c.sha256 == bindparam("sha256"), *_VALID)
_STILL_VALID: Final = select(sessions.c.sha256).where(
    sessions.c.sha256.in_(bindparam("digests", expanding=True)), *_VALID
)


class SessionStore:
    """Sessions and their tokens. ``clock`` returns unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def begin(self, token_id: str) -> str:
        """Start a session for a token; return the cookie's value, which is not stored."""
        secret, now = secrets.token_urlsafe(_RANDOM_BYTES), self._clock()
        mine = sessions.c.token_id == token_id
        newest = (
            select(sessions.c.sha256)
            .where(mine)
            .order_by(sessions.c.created_at.desc())
            .limit(_MOST_OF_A_TOKEN - 1)
        )
        with self._database.write() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at <= now))
            connection.execute(delete(sessions).where(mine, sessions.c.sha256.not_in(newest)))
            row = {
                "sha256": sha256_of(secret),
                "token_id": token_id,
                "created_at": now,
                "expires_at": now + LASTS_S,
            }
            connection.execute(insert(sessions), row)
        return secret

    def find(self, secret: str) -> TokenRow | None:
        """Return the token of a cookie; None if the session or its token has ended."""
        with self._database.autocommit() as connection:
            found = connection.execute(
                _TOKEN_OF, {"sha256": sha256_of(secret), "now": self._clock()}
            ).one_or_none()
        return None if found is None else TokenRow(*found)

    def end(self, secret: str) -> None:
        """End a session; does nothing if it has ended."""
        with self._database.write() as connection:
            connection.execute(delete(sessions).where(sessions.c.sha256 == sha256_of(secret)))

    def still_valid(self, digests: Iterable[str]) -> set[str]:
        """Return those of these SHA-256 that belong to valid sessions."""
        return valid_digests(self._database, _STILL_VALID, digests, self._clock())
