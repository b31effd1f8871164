"""The operator's mail server, from its URL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote, urlsplit

from everstep.options.checks import SMTP_PORTS


@dataclass(frozen=True)
class MailServer:
    """Where mail is handed in, and by whom."""

    scheme: str
    """``smtps``, ``smtp`` (with STARTTLS) or ``smtp+plain``."""
    host: str
    port: int
    sender: str
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def of(cls, url: str, sender: str) -> Self:
        """Return the server of a URL that ``everstep.options`` has checked."""
        parts = urlsplit(url)
        return cls(
            parts.scheme,
            str(parts.hostname),
            parts.port or SMTP_PORTS[parts.scheme],
            sender,
            unquote(parts.username or ""),
            unquote(parts.password or ""),
        )
