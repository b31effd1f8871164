"""Which origins webhooks may have: those that the operator allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import httpx


@dataclass(frozen=True)
class NotifyRule:
    """Which origins webhooks may have, and the key that signs what they are told."""

    origins: frozenset[str] = frozenset()
    """``https://hooks.example.org``, with a port where it is not the scheme's own."""
    secret: str = ""

    def allows(self, url: str) -> bool:
        """Whether this service would ever call ``url``. One that hides its host behind a user name
        has no allowed origin."""
        try:
            return origin_of(url) in self.origins
        except httpx.InvalidURL:
            return False


NOBODY: Final = NotifyRule()


def origin_of(url: str) -> str:
    """Scheme, host and port as they are compared. Raises httpx.InvalidURL."""
    parsed = httpx.URL(url)
    if parsed.userinfo or parsed.scheme not in ("http", "https") or not parsed.host:
        raise httpx.InvalidURL(f"{url!r} has no origin that can be allowed")
    return f"{parsed.scheme}://{parsed.host.lower()}" + (
        f":{parsed.port}" if parsed.port is not None else ""
    )
