"""Checks of single values of options. Each raises ValueError with the value and what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from everstep.home import home_directory
from everstep.wire.alerts import is_mail_address

MIN_TOKEN_CHARS: Final = 32
SMTP_PORTS: Final = {"smtps": 465, "smtp": 587, "smtp+plain": 25}
"""Scheme of a mail server -> its port."""


def path_of(value: Any) -> Any:
    """Return text as an absolute path; other values as they are."""
    return home_directory({"EVERSTEP_HOME": value}) if isinstance(value, str) else value


def absolute(path: Path) -> Path:
    """Return an absolute path."""
    if not path.is_absolute():
        raise ValueError(f"{str(path)!r} is not absolute; give a path that begins with /")
    return path


def items_of(value: Any) -> Any:
    """Split text at commas; text that begins with ``[`` is a JSON list."""
    if not isinstance(value, str):
        return value
    if not value.startswith("["):
        items = tuple(item for item in map(str.strip, value.split(",")) if item)
        if not items:
            raise ValueError(f"{value!r} has no item; name one, or unset it")
        return items
    try:
        return tuple(json.loads(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a JSON list; separate items by commas") from None


def variable_name(pattern: str) -> str:
    """Return the name of a variable; ``*`` may end it."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", pattern):
        raise ValueError(
            f"{pattern!r} is not the name of a variable; give for example HF_TOKEN or HF_*"
        )
    return pattern


def dashboard_url(address: str) -> str:
    """Return the base URL of a Ray dashboard from ``host:port`` or a URL, without a final slash.

    Raises ValueError for an address of Ray's other protocols (GCS, Ray Client) or without a host.
    """
    scheme, separator, rest = address.strip().rpartition("://")
    if separator and scheme not in ("http", "https"):
        raise ValueError(
            f"{address!r} is not a dashboard URL; give the cluster's dashboard, for example "
            "http://head:8265 (the port of `ray start --dashboard-port`, not the GCS or the Ray "
            "Client port)"
        )
    host = rest.rstrip("/")
    if not host or host.startswith(":"):
        raise ValueError(
            f"{address!r} names no host; give the dashboard, for example http://head:8265"
        )
    return f"{scheme or 'http'}://{host}"


def public_url(url: str) -> str:
    """Return an HTTP URL without a final slash; empty text is allowed."""
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not a URL; give for example https://everstep.example.org")
    return url.rstrip("/")


def issuer_url(url: str) -> str:
    """Return the issuer of an identity provider, as it is: the provider's own tokens name it with
    or without a final slash."""
    if not is_confidential_url(url):
        raise ValueError(
            f"{url!r} is not an issuer; give an https URL, for example https://login.example.org "
            "(http only on this machine)"
        )
    return url


def scopes(text: str) -> str:
    """Return scopes of OpenID Connect, separated by single spaces."""
    words = text.split()
    if not text.isascii() or "openid" not in words:
        raise ValueError(f"{text!r} lacks openid; give for example: openid email profile")
    return " ".join(words)


def is_confidential_url(url: str) -> bool:
    """Return whether nobody on the way reads what is sent to a URL: https, or http to this
    machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if not host or parts.username is not None or parts.fragment:
        return False
    local = host in ("localhost", "127.0.0.1", "::1")
    return parts.scheme == "https" or (parts.scheme == "http" and local)


def smtp_url(url: str) -> str:
    """Return the URL of a mail server; empty text is allowed. The error shows no password."""
    form = (
        "use smtps://USER:PASSWORD@HOST, smtp://… for STARTTLS, or smtp+plain://HOST without "
        "encryption and password"
    )
    if not url:
        return url
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError(f"is not a URL; {form}") from None
    if parts.scheme not in SMTP_PORTS or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"is not a mail server; {form}")
    if bool(parts.username) != bool(parts.password):
        raise ValueError("has a user without a password, or a password alone; set both")
    if parts.username and parts.scheme == "smtp+plain":
        raise ValueError("sends a password without encryption; use smtps:// or smtp://")
    return url


def mail_address(text: str) -> str:
    """Return an e-mail address; empty text is allowed."""
    if text and not is_mail_address(text):
        raise ValueError(f"{text!r} is not an e-mail address; give NAME@HOST")
    return text


def metrics_token(secret: str) -> str:
    """Return a secret that is hard to guess, or empty text. The error does not show it."""
    is_word = secret.isascii() and len(secret.split()) == 1
    if secret and (len(secret) < MIN_TOKEN_CHARS or not is_word):
        raise ValueError(
            f"must hold one word of at least {MIN_TOKEN_CHARS} ASCII characters; make one with "
            "`openssl rand -hex 32`"
        )
    return secret


def lower(value: Any) -> Any:
    """Return text in small letters; other values as they are."""
    return value.lower() if isinstance(value, str) else value
