"""Bearer tokens: 256 random bits, of which only the SHA-256 is stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Final

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from service.db.audit import note_target
from service.db.engine import Database
from service.db.ids import new_token_id
from service.db.projects import ensure_project
from service.db.rows import ListedRun, Role, TokenRow, TransitionRow
from service.db.tables import runs, tokens, transitions

PREFIX: Final = "evs_"
_RANDOM_BYTES: Final = 32
_BY_HASH: Final = TokenRow.select(tokens).where(tokens.c.sha256 == bindparam("sha256"))
_WITH_RUN: Final = (
    _BY_HASH.add_columns(*ListedRun.select(runs).selected_columns, *(transitions.c[name] for name in TransitionRow._fields))
    .select_from(tokens.outerjoin(runs, runs.c.id == bindparam("run_id")).outerjoin(transitions, transitions.c.run_id == runs.c.id))
    .order_by(transitions.c.seq)
)
_RUN_AT: Final = len(TokenRow.__dataclass_fields__)
_TRANSITION_AT: Final = _RUN_AT + len(ListedRun._fields)

SeenRun = tuple[ListedRun, list[TransitionRow]]
"""A run with the changes of its status, oldest first, at one moment."""


def new_secret() -> str:
    """A token: ``evs_`` and 256 random bits in URL-safe base64."""
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def sha256_of(secret: str) -> str:
    """What is stored of a token. It has 256 random bits, so a fast hash cannot be searched."""
    return hashlib.sha256(secret.encode()).hexdigest()


class TokenStore:
    """Tokens and whom they stand for. ``clock`` gives unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def create(
        self,
        name: str,
        role: Role,
        project: str | None,
        *,
        expires_at: float | None = None,
        token_id: str | None = None,
    ) -> tuple[TokenRow, str]:
        """Make a token; its secret is returned here and never again.

        Args:
            name: What people call it.
            role: What it may do.
            project: The one project that it reaches; None reaches all.
            expires_at: Unix seconds; None never.
            token_id: Id of a token to replace; the old secret is worthless from then on.
        """
        secret = new_secret()
        return self._put(secret, name, role, project, expires_at, token_id or new_token_id()), secret

    def take_over(self, secret: str, name: str, role: Role, *, token_id: str) -> TokenRow:
        """Make a token of a secret that was made elsewhere, in place of the token ``token_id``; it reaches all projects."""
        return self._put(secret, name, role, None, None, token_id)

    def _put(self, secret: str, name: str, role: Role, project: str | None, expires_at: float | None, token_id: str) -> TokenRow:
        row = TokenRow(
            id=token_id,
            name=name,
            role=role,
            project=project,
            sha256=sha256_of(secret),
            created_at=self._clock(),
            expires_at=expires_at,
            revoked_at=None,
            last_used_at=None,
        )
        note_target(row.id)
        with self._database.write() as connection:
            if project is not None:
                ensure_project(connection, project, row.created_at)
            connection.execute(delete(tokens).where(tokens.c.id == row.id))
            connection.execute(insert(tokens), row.columns())
        return row

    def valid(self) -> list[TokenRow]:
        """Every token that is not revoked, expired ones too, oldest first."""
        query = select(tokens).where(tokens.c.revoked_at.is_(None)).order_by(tokens.c.created_at, tokens.c.id)
        with self._database.read() as connection:
            return [TokenRow.of(row) for row in connection.execute(query).mappings()]

    def revoke(self, token_id: str) -> bool:
        """Make a token worthless from now on; False where there is no such token, or none any more."""
        with self._database.write() as connection:
            still = (tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
            return bool(connection.execute(update(tokens).where(*still).values(revoked_at=self._clock())).rowcount)

    def note_used(self, used_at: Mapping[str, float]) -> None:
        """Remember when tokens were last used: unix seconds by token id."""
        if not used_at:
            return
        statement = update(tokens).where(tokens.c.id == bindparam("token")).values(last_used_at=bindparam("used_at"))
        with self._database.write() as connection:
            connection.execute(statement, [{"token": token, "used_at": at} for token, at in used_at.items()])

    def find(self, secret: str) -> TokenRow | None:
        """Whose token this is; None where it is unknown, expired or revoked."""
        with self._database.look() as connection:
            return self.find_hashed(connection, sha256_of(secret))

    def find_hashed(self, connection: Connection, digest: str) -> TokenRow | None:
        """The same by the secret's SHA-256, as part of something else that is asked of the database or written to it."""
        found = connection.execute(_BY_HASH, {"sha256": digest}).one_or_none()
        return None if found is None else self._accepted(TokenRow(*found), digest)

    def find_with_run(self, secret: str, run_id: str) -> tuple[TokenRow | None, SeenRun | None]:
        """The same, and a run, by one question to the database: nearly all requests about one run ask for no more."""
        digest = sha256_of(secret)
        with self._database.look() as connection:
            rows = connection.execute(_WITH_RUN, {"sha256": digest, "run_id": run_id}).all()
        token = self._accepted(TokenRow(*rows[0][:_RUN_AT]), digest) if rows else None
        run = ListedRun.seen(rows[0][_RUN_AT:_TRANSITION_AT]) if rows else None
        if token is None or run is None:
            return token, None
        return token, (run, [TransitionRow._make(row[_TRANSITION_AT:]) for row in rows if row[_TRANSITION_AT] is not None])

    def _accepted(self, row: TokenRow, digest: str) -> TokenRow | None:
        """The token, where it is worth something now."""
        # The index finds by hash, which tells an attacker nothing; the comparison that grants access takes constant time.
        if not hmac.compare_digest(row.sha256, digest) or row.revoked_at is not None:
            return None
        if row.expires_at is not None and row.expires_at <= self._clock():
            return None
        return row
