"""Bearer tokens: 256 random bits, of which only the SHA-256 is stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, String, bindparam, delete, insert, or_, select, update

from service.db.audit import note_target
from service.db.engine import Database
from service.db.ids import new_token_id
from service.db.projects import ensure_project
from service.db.status_changes import STATUS_CHANGES, changes_of
from service.db.tables import runs, tokens
from service.model.rows import Role, TokenRow, TransitionRow
from service.model.run_rows import ListedRun

PREFIX: Final = "evs_"
_RANDOM_BYTES: Final = 32
_BY_HASH: Final = TokenRow.select(tokens).where(tokens.c.sha256 == bindparam("sha256"))
_WITH_RUN: Final = _BY_HASH.add_columns(
    *ListedRun.select(runs).selected_columns, STATUS_CHANGES
).select_from(tokens.outerjoin(runs, runs.c.id == bindparam("run_id")))
_RUN_AT: Final = len(TokenRow.__dataclass_fields__)
_STILL_HOLDS: Final = (
    select(tokens.c.id)
    .where(
        tokens.c.sha256 == bindparam("claim_sha256"),
        tokens.c.role == bindparam("claim_role"),
        tokens.c.project.is_not_distinct_from(bindparam("claim_project", type_=String)),
        tokens.c.revoked_at.is_(None),
        or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > bindparam("claim_now")),
    )
    .scalar_subquery()
)
_STILL_VALID: Final = select(tokens.c.sha256).where(
    tokens.c.sha256.in_(bindparam("digests", expanding=True)),
    tokens.c.revoked_at.is_(None),
    or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > bindparam("now")),
)
_CHUNK: Final = 500
CLAIM_HOLDS: Final = _STILL_HOLDS.is_not(None)
"""Whether a claim holds, as a column beside what is asked for it; its parameters are a claim's
``values``."""
_HOLDS: Final = select(CLAIM_HOLDS)

SeenRun = tuple[ListedRun, list[TransitionRow]]
"""A run with the changes of its status, oldest first, at one moment."""


@dataclass(frozen=True)
class Claim:
    """What a token was when it was last looked for."""

    sha256: str
    """Of its secret."""
    role: Role
    project: str | None

    def values(self, now: float) -> dict[str, Any]:
        return {
            "claim_sha256": self.sha256,
            "claim_role": self.role,
            "claim_project": self.project,
            "claim_now": now,
        }

    def holds(self, connection: Connection, now: float) -> bool:
        """Whether it still is at ``now``, as part of what is asked of the database, or written to
        it, for it."""
        return bool(connection.execute(_HOLDS, self.values(now)).scalar_one())


def new_secret() -> str:
    """A token: ``evs_`` and 256 random bits in URL-safe base64."""
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def sha256_of(secret: str) -> str:
    """What is stored of a token. It has 256 random bits, so a fast hash cannot be searched."""
    return hashlib.sha256(secret.encode()).hexdigest()


def valid_digests(
    database: Database, query: Select[Any], digests: Iterable[str], now: float
) -> set[str]:
    """Return those of many SHA-256 that a query for ``digests`` finds valid at ``now``."""
    wanted, found = list(digests), set[str]()
    with database.look() as connection:
        for start in range(0, len(wanted), _CHUNK):
            found.update(
                connection.execute(
                    query, {"digests": wanted[start : start + _CHUNK], "now": now}
                ).scalars()
            )
    return found


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
        create_project: bool = True,
    ) -> tuple[TokenRow, str]:
        """Make a token; its secret is returned here and never again.

        Args:
            name: What people call it.
            role: What it may do.
            project: The one project that it reaches; None reaches all.
            expires_at: Unix seconds; None never.
            token_id: Id of a token to replace; the old secret is worthless from then on.
            create_project: Make the project where it is missing; else that raises UnknownProject.
        """
        secret = new_secret()
        row = self._put(
            secret,
            name,
            role,
            project,
            expires_at,
            token_id or new_token_id(),
            create_project=create_project,
        )
        return row, secret

    def take_over(self, secret: str, name: str, role: Role, *, token_id: str) -> TokenRow:
        """Make a token of a secret that was made elsewhere, in place of the token ``token_id``; it
        reaches all projects."""
        return self._put(secret, name, role, None, None, token_id)

    def _put(
        self,
        secret: str,
        name: str,
        role: Role,
        project: str | None,
        expires_at: float | None,
        token_id: str,
        *,
        create_project: bool = True,
    ) -> TokenRow:
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
                ensure_project(connection, project, row.created_at, create=create_project)
            connection.execute(delete(tokens).where(tokens.c.id == row.id))
            connection.execute(insert(tokens), row.columns())
        return row

    def valid(self) -> list[TokenRow]:
        """Every token that is not revoked, expired ones too, oldest first."""
        query = (
            select(tokens)
            .where(tokens.c.revoked_at.is_(None))
            .order_by(tokens.c.created_at, tokens.c.id)
        )
        with self._database.read() as connection:
            return [TokenRow.of(row) for row in connection.execute(query).mappings()]

    def revoke(self, token_id: str) -> bool:
        """Make a token worthless from now on; False where there is no such token, or none any
        more."""
        with self._database.write() as connection:
            still = (tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
            return bool(
                connection.execute(
                    update(tokens).where(*still).values(revoked_at=self._clock())
                ).rowcount
            )

    def note_used(self, used_at: Mapping[str, float]) -> None:
        """Remember when tokens were last used: unix seconds by token id."""
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
        """Whose token this is; None where it is unknown, expired or revoked."""
        digest = sha256_of(secret)
        with self._database.look() as connection:
            found = connection.execute(_BY_HASH, {"sha256": digest}).one_or_none()
        return None if found is None else self._accepted(TokenRow(*found), digest)

    def still_valid(self, digests: Iterable[str]) -> set[str]:
        """Return those of these SHA-256 that belong to valid tokens."""
        return valid_digests(self._database, _STILL_VALID, digests, self._clock())

    def find_with_run(self, secret: str, run_id: str) -> tuple[TokenRow | None, SeenRun | None]:
        """The same, and a run, by one question to the database: nearly all requests about one run
        ask for no more."""
        digest = sha256_of(secret)
        with self._database.look() as connection:
            row = connection.execute(_WITH_RUN, {"sha256": digest, "run_id": run_id}).one_or_none()
        token = None if row is None else self._accepted(TokenRow(*row[:_RUN_AT]), digest)
        if row is None or token is None or row[_RUN_AT] is None:
            return token, None
        run = ListedRun.read(row[_RUN_AT:-1])
        return token, (run, changes_of(run.id, row[-1]))

    def _accepted(self, row: TokenRow, digest: str) -> TokenRow | None:
        """The token, where it is worth something now."""
        # The index finds by hash, which tells an attacker nothing; the comparison that grants
        # access takes constant time.
        if not hmac.compare_digest(row.sha256, digest) or row.revoked_at is not None:
            return None
        if row.expires_at is not None and row.expires_at <= self._clock():
            return None
        return row
