"""Bearer tokens: 256 random bits, stored as their SHA-256."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Select,
    bindparam,
    delete,
    insert,
    or_,
    select,
    update,
)

from service.db.audit import note_target
from service.db.engine import Database, Store, replace_rows
from service.db.ids import random_id
from service.db.projects import ensure_project
from service.db.tables import sessions, tokens
from service.model.rows import NAME_CHARS, Role, SessionRow, TokenKind, TokenRow

PREFIX: Final = "evs_"
SECRET_BYTES: Final = 32
_BY_HASH: Final = TokenRow.select(tokens).where(tokens.c.sha256 == bindparam("sha256"))
_STILL_VALID: Final = select(tokens.c.sha256).where(
    tokens.c.sha256.in_(bindparam("digests", expanding=True)),
    tokens.c.revoked_at.is_(None),
    or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > bindparam("now")),
)


def new_secret() -> str:
    """Return a new token: ``evs_`` and 256 random bits in URL-safe base64."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def sha256_of(secret: str) -> str:
    """Return what is stored of a token. With 256 random bits, a fast hash is safe against
    search."""
    return hashlib.sha256(secret.encode()).hexdigest()


def valid_digests(
    database: Database, query: Select[Any], digests: Iterable[str], now: float
) -> set[str]:
    """Return those of the SHA-256 that a query for ``digests`` finds valid at ``now``."""
    with database.read() as connection:
        found = connection.execute(query, {"digests": list(digests), "now": now})
        return set(found.scalars())


class TokenStore(Store):
    """Tokens and what they allow."""

    def create(
        self,
        name: str,
        role: Role,
        project: str | None,
        *,
        expires_at: float | None = None,
        token_id: str | None = None,
        create_project: bool = True,
    ) -> tuple[TokenRow, str]:
        """Create a token; its secret is returned only here.

        Args:
            name: display name.
            role: the token's role.
            project: the one project that the token gives access to; None for all.
            expires_at: unix seconds; None never.
            token_id: id of a token to replace, whose old secret is revoked.
            create_project: create the project if it does not exist; otherwise that raises
                UnknownProject.
        """
        secret = new_secret()
        row = self.put(
            secret,
            name,
            role,
            project,
            expires_at,
            token_id or random_id("tok"),
            create_project=create_project,
        )
        return row, secret

    def put(
        self,
        secret: str,
        name: str,
        role: Role,
        project: str | None,
        expires_at: float | None,
        token_id: str,
        *,
        create_project: bool = True,
        user: TokenRow | None = None,
    ) -> TokenRow:
        """Store a token with this secret, in place of an earlier one of its id; see ``create``.
        ``user`` is the token of the log-in of whoever owns it."""
        row = TokenRow(
            id=token_id,
            name=name,
            role=role,
            project=project,
            sha256=sha256_of(secret),
            created_at=self.clock(),
            expires_at=expires_at,
            user_id=user.user_id if user else None,
            owner=user.owner if user else None,
            kind="personal" if user else None,
        )
        note_target(row.id)
        with self._database.write() as connection:
            if project is not None:
                ensure_project(connection, project, row.created_at, create=create_project)
            replace_rows(connection, tokens, row.columns())
        return row

    def create_personal(
        self, user: TokenRow, label: str, role: Role, expires_at: float
    ) -> tuple[TokenRow, str]:
        """Create a user's own token, with the project of the token of their log-in.

        Args:
            user: the token of the user's log-in.
            label: what the user calls it.
            role: at most the user's own.
            expires_at: unix seconds.
        """
        secret = new_secret()
        row = self.put(
            secret,
            f"{user.owner}: {label}"[:NAME_CHARS],
            role,
            user.project,
            expires_at,
            random_id("tok"),
            user=user,
        )
        return row, secret

    def of_user(self, user_id: str, kind: TokenKind) -> list[TokenRow]:
        """Return a user's valid tokens of a kind, oldest first."""
        return [
            row
            for row in self.valid()
            if (row.user_id, row.kind) == (user_id, kind)
            and (row.expires_at is None or row.expires_at > self.clock())
        ]

    def valid(self) -> list[TokenRow]:
        """Return every token that is not revoked, including expired ones, oldest first."""
        query = TokenRow.select(tokens).where(tokens.c.revoked_at.is_(None))
        return self._rows(TokenRow, query.order_by(tokens.c.created_at, tokens.c.id))

    def revoke(self, token_id: str) -> bool:
        """Revoke a token; return False if it does not exist or is already revoked."""
        with self._database.write() as connection:
            still = (tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
            return bool(
                connection.execute(
                    update(tokens).where(*still).values(revoked_at=self.clock())
                ).rowcount
            )

    def note_used(self, used_at: Mapping[str, float]) -> None:
        """Record when tokens were last used: unix seconds by token id."""
        if not used_at:
            return
        statement = (
            update(tokens)
            .where(tokens.c.id == bindparam("token"))
            .values(last_used_at=bindparam("used_at"))
        )
        with self._database.write() as connection:
            connection.execute(
                statement, [{"token": token, "used_at": at} for token, at in used_at.items()]
            )

    def find(self, secret: str) -> TokenRow | None:
        """Return the token of a secret; None if it is unknown, expired or revoked."""
        digest = sha256_of(secret)
        with self._database.read() as connection:
            found = connection.execute(_BY_HASH, {"sha256": digest}).one_or_none()
        return None if found is None else self._accepted(TokenRow(*found), digest)

    def still_valid(self, digests: Iterable[str]) -> set[str]:
        """Return those of these SHA-256 that belong to valid tokens."""
        return valid_digests(self._database, _STILL_VALID, digests, self.clock())

    def _accepted(self, row: TokenRow, digest: str) -> TokenRow | None:
        """Return the token if it is valid now."""
        # The lookup is by hash, which leaks nothing useful; the deciding comparison takes constant
        # time.
        if not hmac.compare_digest(row.sha256, digest) or row.revoked_at is not None:
            return None
        if row.expires_at is not None and row.expires_at <= self.clock():
            return None
        return row


# ---------------------------------------------------------------- sessions

# Browser sessions: a random cookie, stored as its SHA-256, that stands for a token until either
# ends.

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

_SESSIONS_STILL_VALID: Final = select(sessions.c.sha256).where(
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


class SessionStore(Store):
    """Sessions and their tokens."""

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
        secret, now = secrets.token_urlsafe(_RANDOM_BYTES), self.clock()
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
        with self._database.read() as connection:
            found = connection.execute(
                _TOKEN_OF, {"sha256": sha256_of(secret), "now": self.clock()}
            ).one_or_none()
        return None if found is None else TokenRow(*found)

    def valid(self, holder: Holder | None = None) -> list[SessionRow]:
        """Return the sessions that have not ended, newest first; None for those of everybody."""
        query = _LISTED if holder is None else _LISTED.where(holder.tokens())
        with self._database.read() as connection:
            found = connection.execute(query, {"now": self.clock()})
            return [SessionRow(*row) for row in found]

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
        return valid_digests(self._database, _SESSIONS_STILL_VALID, digests, self.clock())
