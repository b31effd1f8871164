"""Bearer tokens: 256 random bits, stored as their SHA-256."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, String, bindparam, insert, or_, select, update

from service.db.audit import note_target
from service.db.engine import Database, insert_into, replace_row
from service.db.lease import new_token_id, new_user_id
from service.db.projects import ensure_project
from service.db.tables import runs, tokens, users
from service.db.writer import STATUS_CHANGES, changes_of
from service.model.provider_rule import Grant
from service.model.rows import NAME_CHARS, Role, TokenKind, TokenRow, TransitionRow, UserRow
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
"""Column that says whether a claim holds, to add to another query; its parameters are
``Claim.values``."""
_HOLDS: Final = select(CLAIM_HOLDS)

SeenRun = tuple[ListedRun, list[TransitionRow]]
"""A run and its transitions, oldest first, at the same time."""


@dataclass(frozen=True)
class Claim:
    """A token's properties when it was last looked up."""

    sha256: str
    """SHA-256 of its secret."""
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
        """Return whether the claim still holds at ``now``, in the transaction that uses it."""
        return bool(connection.execute(_HOLDS, self.values(now)).scalar_one())


def new_secret() -> str:
    """Return a new token: ``evs_`` and 256 random bits in URL-safe base64."""
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def sha256_of(secret: str) -> str:
    """Return what is stored of a token. With 256 random bits, a fast hash is safe against
    search."""
    return hashlib.sha256(secret.encode()).hexdigest()


def valid_digests(
    database: Database, query: Select[Any], digests: Iterable[str], now: float
) -> set[str]:
    """Return those of many SHA-256 that a query for ``digests`` finds valid at ``now``."""
    wanted, found = list(digests), set[str]()
    with database.autocommit() as connection:
        for start in range(0, len(wanted), _CHUNK):
            found.update(
                connection.execute(
                    query, {"digests": wanted[start : start + _CHUNK], "now": now}
                ).scalars()
            )
    return found


class TokenStore:
    """Tokens and what they allow. ``clock`` returns unix seconds."""

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
        """Create a token from an existing secret, in place of the token ``token_id``; it gives
        access to all projects."""
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
        user: TokenRow | None = None,
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
            user_id=user.user_id if user else None,
            owner=user.owner if user else None,
            kind="personal" if user else None,
        )
        note_target(row.id)
        with self._database.write() as connection:
            if project is not None:
                ensure_project(connection, project, row.created_at, create=create_project)
            replace_row(connection, tokens, row.columns())
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
        row = self._put(
            secret,
            f"{user.owner}: {label}"[:NAME_CHARS],
            role,
            user.project,
            expires_at,
            new_token_id(),
            user=user,
        )
        return row, secret

    def of_user(self, user_id: str, kind: TokenKind) -> list[TokenRow]:
        """Return a user's valid tokens of a kind, oldest first."""
        return [
            row
            for row in self.valid()
            if (row.user_id, row.kind) == (user_id, kind)
            and (row.expires_at is None or row.expires_at > self._clock())
        ]

    def valid(self) -> list[TokenRow]:
        """Return every token that is not revoked, including expired ones, oldest first."""
        query = (
            select(tokens)
            .where(tokens.c.revoked_at.is_(None))
            .order_by(tokens.c.created_at, tokens.c.id)
        )
        with self._database.read() as connection:
            return [TokenRow.of(row) for row in connection.execute(query).mappings()]

    def revoke(self, token_id: str) -> bool:
        """Revoke a token; return False if it does not exist or is already revoked."""
        with self._database.write() as connection:
            still = (tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
            return bool(
                connection.execute(
                    update(tokens).where(*still).values(revoked_at=self._clock())
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
        with self._database.autocommit() as connection:
            found = connection.execute(_BY_HASH, {"sha256": digest}).one_or_none()
        return None if found is None else self._accepted(TokenRow(*found), digest)

    def still_valid(self, digests: Iterable[str]) -> set[str]:
        """Return those of these SHA-256 that belong to valid tokens."""
        return valid_digests(self._database, _STILL_VALID, digests, self._clock())

    def find_with_run(self, secret: str, run_id: str) -> tuple[TokenRow | None, SeenRun | None]:
        """Return the token of a secret, and a run, in one query: most requests about a run need
        only these."""
        digest = sha256_of(secret)
        with self._database.autocommit() as connection:
            row = connection.execute(_WITH_RUN, {"sha256": digest, "run_id": run_id}).one_or_none()
        token = None if row is None else self._accepted(TokenRow(*row[:_RUN_AT]), digest)
        if row is None or token is None or row[_RUN_AT] is None:
            return token, None
        run = ListedRun.read(row[_RUN_AT:-1])
        return token, (run, changes_of(run.id, row[-1]))

    def _accepted(self, row: TokenRow, digest: str) -> TokenRow | None:
        """Return the token if it is valid now."""
        # The lookup is by hash, which leaks nothing useful; the deciding comparison takes constant
        # time.
        if not hmac.compare_digest(row.sha256, digest) or row.revoked_at is not None:
            return None
        if row.expires_at is not None and row.expires_at <= self._clock():
            return None
        return row


# ---------------------------------------------------------------- users

# People who log in at an identity provider, and the tokens that carry their rights.


class UserStore:
    """Users by issuer and subject. ``clock`` returns unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

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
        now = self._clock()
        row = UserRow(new_user_id(), issuer, subject, name, now, now)
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
                update(tokens).where(tokens.c.id.in_(lost)).values(revoked_at=self._clock())
            )

    def _rename(self, connection: Connection, user: UserRow) -> None:
        """Let the user's tokens carry the address of this log-in."""
        mine = tokens.c.user_id == user.id
        connection.execute(update(tokens).where(mine).values(owner=user.name))
        connection.execute(
            update(tokens).where(mine, tokens.c.kind == "log_in").values(name=user.name)
        )

    def _new_token(self, connection: Connection, user: UserRow, grant: Grant) -> TokenRow:
        now = self._clock()
        if grant.project is not None:
            ensure_project(connection, grant.project, now, create=True)
        row = TokenRow(
            id=new_token_id(),
            name=user.name,
            role=grant.role,
            project=grant.project,
            sha256=sha256_of(secrets.token_urlsafe(_RANDOM_BYTES)),
            created_at=now,
            expires_at=None,
            revoked_at=None,
            last_used_at=None,
            user_id=user.id,
            owner=user.name,
            kind="log_in",
        )
        connection.execute(insert(tokens), row.columns())
        return row


def _is_covered(row: TokenRow, grants: Sequence[Grant]) -> bool:
    """Return whether the user may keep a token: a log-in's if it is one of the grants, a personal
    one if a grant includes its rights."""
    if row.kind == "log_in":
        return Grant(row.role, row.project) in grants
    return any(grant.covers(row.role, row.project) for grant in grants)
