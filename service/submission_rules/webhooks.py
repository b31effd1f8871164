"""The origins that webhooks may call: those that the operator allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import httpx


@dataclass(frozen=True)
class NotifyRule:
    """The origins that webhooks may call, and the key of the signatures."""

    origins: frozenset[str] = frozenset()
    """``https://hooks.example.org``, with the port if it is not the scheme's default."""
    secret: str = ""

    def allows(self, url: str) -> bool:
        """Return whether this service may call ``url``. A URL with a user name is never allowed."""
        try:
            return origin_of(url) in self.origins
        except httpx.InvalidURL:
            return False


NOBODY: Final = NotifyRule()


def origin_of(url: str) -> str:
    """Return scheme, host and port in the form that is compared. Raises httpx.InvalidURL."""
    parsed = httpx.URL(url)
    if parsed.userinfo or parsed.scheme not in ("http", "https") or not parsed.host:
        raise httpx.InvalidURL(f"{url!r} has no origin that can be allowed")
    return f"{parsed.scheme}://{parsed.host.lower()}" + (
        f":{parsed.port}" if parsed.port is not None else ""
    )
