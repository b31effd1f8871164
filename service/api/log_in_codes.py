"""Codes of links that log a browser in: each works once, for a few minutes, in this process
only."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from service.db.tokens import sha256_of

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
