"""Find the service's URL and token: from arguments, the environment, or this machine's home
directory."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from everstep.client.contexts import read_contexts
from everstep.errors import UsageError
from everstep.home import home_directory

DEFAULT_URL = "http://127.0.0.1:8000"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True)
class Address:
    """Base URL of a service without a trailing slash, the token for it, and the token's source."""

    url: str
    token: str | None
    token_source: str
    """Text for messages."""

    @property
    def is_local(self) -> bool:
        """Return whether the service is on this machine."""
        return is_loopback(self.url)


def is_loopback(url: str) -> bool:
    """Return whether a URL's host is this machine."""
    return urlsplit(url).hostname in _LOOPBACK


def find_address(
    url: str | None = None, token: str | None = None, environ: Mapping[str, str] = os.environ
) -> Address:
    """Return URL and token: from the arguments, else EVERSTEP_URL and EVERSTEP_TOKEN, else the
    log-in in use (`everstep login`), else the files of a service on this machine.

    The token file is an administrator's, so it is only sent to this machine. Raise UsageError for
    an invalid URL or token.
    """
    home = home_directory(environ)
    noted = _read(home / "url")
    given, contexts = url or environ.get("EVERSTEP_URL"), read_contexts(environ)
    if not given and token is None and not environ.get("EVERSTEP_TOKEN") and contexts.in_use:
        used = contexts.in_use
        return Address(used.url, used.token, f"the log-in {contexts.current}")
    found = checked_url(given or noted or DEFAULT_URL)
    if token is not None:
        return Address(
            found,
            checked_token(token, "the token given to the client"),
            "the token given to the client",
        )
    if environ.get("EVERSTEP_TOKEN"):
        return Address(
            found, checked_token(environ["EVERSTEP_TOKEN"], "EVERSTEP_TOKEN"), "EVERSTEP_TOKEN"
        )
    if known := contexts.token_for(found):
        return Address(found, known, f"the log-in to {found}")
    file = home / "token"
    host = urlsplit(found).hostname
    if not (
        host in _LOOPBACK or host == socket.gethostname() or (noted and found == checked_url(noted))
    ):
        return Address(
            found,
            None,
            f"no token: {file} is only sent to this machine; run `everstep "
            f"login {found}`, or set EVERSTEP_TOKEN",
        )
    local = _read(file)
    if local is None:
        return Address(
            found, None, f"no token: set EVERSTEP_TOKEN, or start the service, which writes {file}"
        )
    return Address(found, checked_token(local, str(file)), f"the token in {file}")


def _read(path: Path) -> str | None:
    """Return the stripped content; None if the file is missing, empty or unreadable."""
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def checked_url(url: str) -> str:
    """Return the URL, with http:// added to ``host:port``. Raise UsageError without a host, or for
    another protocol."""
    whole = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(whole)
        usable = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"{url!r} is not the URL of a service; use a URL such as {DEFAULT_URL}")
    return whole.rstrip("/")


def checked_token(token: str, source: str) -> str:
    stripped = token.strip()
    if not stripped or not stripped.isascii() or not stripped.isprintable() or " " in stripped:
        raise UsageError(f"{source} is not a token: it must be one word of printable ASCII")
    return stripped
