"""One log-in on its way through the provider: what the browser keeps until it returns."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, fields
from typing import Final, Self

LASTS_S: Final = 600
"""Longest time that a person may take at the provider."""
_RANDOM_BYTES: Final = 32


@dataclass(frozen=True)
class Flow:
    """The secrets of one log-in. They lie in a cookie of the browser that began it, so any replica
    can finish it, and no other browser can."""

    state: str
    """Ties the provider's redirect to this browser."""
    nonce: str
    """Ties the ID token to this log-in."""
    verifier: str
    """PKCE: ties the code to this log-in."""
    target: str
    """Page that the person wanted."""

    @classmethod
    def new(cls, target: str) -> Self:
        state, nonce, verifier = (secrets.token_urlsafe(_RANDOM_BYTES) for _ in range(3))
        return cls(state, nonce, verifier, target)

    @property
    def challenge(self) -> str:
        """Return PKCE's S256 challenge."""
        digest = hashlib.sha256(self.verifier.encode()).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def cookie(self) -> str:
        """Return the cookie's value."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).rstrip(b"=").decode()

    @classmethod
    def read(cls, cookie: str) -> Self | None:
        """Return the log-in of a cookie; None if it has none or is damaged."""
        try:
            found = json.loads(base64.urlsafe_b64decode(cookie + "=" * (-len(cookie) % 4)))
            values = [found[field.name] for field in fields(cls)]
        except (ValueError, TypeError, KeyError):
            return None
        return cls(*values) if all(isinstance(each, str) and each for each in values) else None
