"""Ids that sort by creation time, and keys by which a repeated request creates no second run."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, insert, select

from service.db.engine import DatabaseError
from service.db.run_lookup import find_run
from service.db.tables import idempotency_keys
from service.model.run_rows import RunRow

# ---------------------------------------------------------------- ids

ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base32 in lower case: in ASCII order, without letters that look like digits."""
RUN_ID_PATTERN: Final = re.compile(r"run_[0-9a-hjkmnp-tv-z]{12}")
_EPOCH_S: Final = 1_704_067_200  # 2024-01-01; 41 bits of milliseconds reach to 2093
_RANDOM_BITS: Final = 19


def new_id(kind: str, now: float) -> str:
    """Return ``kind``, an underscore and 12 characters: 41 bits of milliseconds, then 19 random
    bits.

    Two ids of one millisecond may collide (1 in 524,288); for runs, the primary key detects it,
    and the store draws again.
    """
    milliseconds = max(0, int((now - _EPOCH_S) * 1000)) & (2**41 - 1)
    return _named(kind, milliseconds << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS))


def random_id(kind: str) -> str:
    """Return ``kind``, an underscore and 12 random characters."""
    return _named(kind, secrets.randbits(60))


def _named(kind: str, number: int) -> str:
    return f"{kind}_{''.join(ALPHABET[number >> 5 * place & 31] for place in range(11, -1, -1))}"


# ---------------------------------------------------------------- idempotency

# Idempotency keys: a repeated request creates no second run.


class IdempotencyConflict(DatabaseError):
    """The idempotency key was used before, with another body or for a deleted run."""


@dataclass(frozen=True)
class IdempotencyKey:
    """A client's name for a request: the same key and body return the same run."""

    scope: str
    """Token id; keys of different tokens are independent."""
    key: str
    body_sha256: str


def used(connection: Connection, idempotency: IdempotencyKey) -> tuple[str, str] | None:
    """Return ``body_sha256`` and ``run_id`` of the request with this key; None if it is new."""
    keys = idempotency_keys.c
    query = select(keys.body_sha256, keys.run_id)
    query = query.where(keys.scope == idempotency.scope, keys.key == idempotency.key)
    found = connection.execute(query).one_or_none()
    return found and (found.body_sha256, found.run_id)


def known_run(connection: Connection, idempotency: IdempotencyKey | None) -> RunRow | None:
    """Return the run that was created with this key, or None. Raise IdempotencyConflict."""
    if idempotency is None:
        return None
    found = used(connection, idempotency)
    if found is None:
        return None
    body_sha256, run_id = found
    if body_sha256 != idempotency.body_sha256:
        raise IdempotencyConflict(
            f"Idempotency-Key {idempotency.key!r} was used with another body; use a new key for a "
            "new request"
        )
    run = find_run(connection, run_id)
    if run is None:
        raise IdempotencyConflict(
            f"Idempotency-Key {idempotency.key!r} was used for run {run_id}, which was "
            "deleted; use a new key"
        )
    return run


def remember(connection: Connection, idempotency: IdempotencyKey, run_id: str, now: float) -> None:
    """Store that this key created a run."""
    connection.execute(
        insert(idempotency_keys).values(
            scope=idempotency.scope,
            key=idempotency.key,
            body_sha256=idempotency.body_sha256,
            run_id=run_id,
            created_at=now,
        )
    )
