"""People who log in at an identity provider, and the tokens that carry their rights."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from sqlalchemy import Connection, insert, update

from service.db.conflicts import insert_into
from service.db.engine import Database
from service.db.ids import new_token_id, new_user_id
from service.db.projects import ensure_project
from service.db.tables import tokens, users
from service.db.tokens import sha256_of
from service.model.provider_rule import Grant
from service.model.rows import TokenRow, UserRow

_RANDOM_BYTES: Final = 32


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
