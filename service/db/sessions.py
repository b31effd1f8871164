"""Browser sessions: a random cookie, stored as its SHA-256, that stands for a token until either
ends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, bindparam, delete, insert, or_, select, update

from service.db.audit import note_target
from service.db.engine import Database
from service.db.tables import sessions, tokens
from service.db.tokens import sha256_of, valid_digests
from service.model.rows import SessionRow, TokenRow

LASTS_S: Final = 30 * 24 * 3600.0
_MOST_OF_A_TOKEN: Final = 100
"""Maximum number of sessions of a token; a further log-in ends the oldest."""
_RANDOM_BYTES: Final = 32
_BROWSER_CHARS: Final = 256
_VALID: Final = (
    sessions.c.token_id == tokens.c.id,
    sessions.c.expires_at > bindparam("now"),
    tokens.c.revoked_at.is_(None),
    or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > bindparam("now")),
)
_TOKEN_OF: Final = TokenRow.select(tokens).where(sessions.c.sha256 == bindparam("sha256"), *_VALID)
_LISTED: Final = (
    select(
        *(
            (tokens if name in ("name", "role", "project") else sessions).c[name]
            for name in SessionRow.__dataclass_fields__
        )
    )
    .select_from(sessions.join(tokens, tokens.c.id == sessions.c.token_id))
    .where(*_VALID)
    .order_by(sessions.c.created_at.desc(), sessions.c.sha256)
)
_STILL_VALID: Final = select(sessions.c.sha256).where(
    sessions.c.sha256.in_(bindparam("digests", expanding=True)), *_VALID
)


@dataclass(frozen=True)
class Holder:
    """Whose sessions are meant: a user's, over all of their tokens, or those of one token that
    belongs to no user."""

    token_id: str
    user_id: str | None

    def tokens(self) -> ColumnElement[bool]:
        """Return the condition for their tokens."""
        if self.user_id is None:
            return tokens.c.id == self.token_id
        return tokens.c.user_id == self.user_id


class SessionStore:
    """Sessions and their tokens. ``clock`` returns unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def begin(
        self,
        token_id: str,
        lasts_s: float = LASTS_S,
        address: str | None = None,
        browser: str | None = None,
    ) -> str:
        """Start a session for a token; return the cookie's value, which is not stored.

        Args:
            token_id: the token that it stands for.
            lasts_s: seconds until it ends.
            address: where the log-in came from.
            browser: the User-Agent header.
        """
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
                "expires_at": now + lasts_s,
                "address": address,
                "browser": browser and browser[:_BROWSER_CHARS],
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

    def valid(self, holder: Holder | None = None) -> list[SessionRow]:
        """Return the sessions that have not ended, newest first; None for those of everybody."""
        query = _LISTED if holder is None else _LISTED.where(holder.tokens())
        with self._database.read() as connection:
            found = connection.execute(query, {"now": self._clock()})
            return [SessionRow.of(row) for row in found.mappings()]

    def end_by_id(self, session_id: str, holder: Holder | None = None) -> bool:
        """End a session; return False if ``valid(holder)`` has none of this id."""
        note_target(session_id)
        found = [row.sha256 for row in self.valid(holder) if row.id == session_id]
        with self._database.write() as connection:
            return bool(
                connection.execute(delete(sessions).where(sessions.c.sha256.in_(found))).rowcount
            )

    def end_others(self, secret: str, holder: Holder) -> int:
        """End all sessions of a holder but that of ``secret``; return their number."""
        mine = select(tokens.c.id).where(holder.tokens())
        others = (sessions.c.token_id.in_(mine), sessions.c.sha256 != sha256_of(secret))
        with self._database.write() as connection:
            return connection.execute(delete(sessions).where(*others)).rowcount

    def switch(self, secret: str, to: TokenRow) -> None:
        """Let a session stand for another token of its user, with other rights. Does nothing for
        another user's session."""
        mine = select(tokens.c.id).where(tokens.c.user_id == to.user_id, tokens.c.kind == "log_in")
        here = (sessions.c.sha256 == sha256_of(secret), sessions.c.token_id.in_(mine))
        with self._database.write() as connection:
            connection.execute(update(sessions).where(*here).values(token_id=to.id))

    def end(self, secret: str) -> None:
        """End a session; does nothing if it has ended."""
        with self._database.write() as connection:
            connection.execute(delete(sessions).where(sessions.c.sha256 == sha256_of(secret)))

    def still_valid(self, digests: Iterable[str]) -> set[str]:
        """Return those of these SHA-256 that belong to valid sessions."""
        return valid_digests(self._database, _STILL_VALID, digests, self._clock())
