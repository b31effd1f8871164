"""Which service a client speaks to: its address, and the contexts that remember several."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from everstep.errors import UsageError
from everstep.options.model import home_directory

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


# ---------------------------------------------------------------- contexts

# Services that this user has logged in to: a file of URLs and tokens that only its owner can
# read.

FILE = "contexts.json"


@dataclass(frozen=True)
class LogIn:
    """A service, and a token for it."""

    url: str
    """Base URL without a trailing slash."""
    token: str


@dataclass(frozen=True)
class Contexts:
    """The services by the names that the user gave them."""

    log_ins: Mapping[str, LogIn] = field(default_factory=dict)
    current: str | None = None
    """Name of the one in use; None for the service on this machine."""

    @property
    def in_use(self) -> LogIn | None:
        return None if self.current is None else self.log_ins.get(self.current)

    def token_for(self, url: str) -> str | None:
        """Return the token for exactly this URL, of the newest log-in that has it."""
        found = [each.token for each in self.log_ins.values() if each.url == url]
        return found[-1] if found else None

    def with_log_in(self, name: str, log_in: LogIn) -> Contexts:
        """Return these with one more, in use."""
        others = {key: each for key, each in self.log_ins.items() if key != name}
        return Contexts({**others, name: log_in}, name)

    def using(self, name: str | None) -> Contexts:
        """Return these with another one in use. Raise UsageError for an unknown name."""
        if name is not None:
            self._check(name)
        return replace(self, current=name)

    def without(self, name: str) -> Contexts:
        """Return these without one. Raise UsageError for an unknown name."""
        self._check(name)
        others = {key: each for key, each in self.log_ins.items() if key != name}
        return Contexts(others, None if self.current == name else self.current)

    def _check(self, name: str) -> None:
        if name not in self.log_ins:
            known = ", ".join(sorted(self.log_ins)) or "none"
            raise UsageError(
                f"there is no log-in {name!r} (known: {known}); run `everstep login URL --name "
                f"{name}`"
            )


def read_contexts(environ: Mapping[str, str] = os.environ) -> Contexts:
    """Return the user's log-ins; none if there is no file. Raise UsageError for a damaged file."""
    path = home_directory(environ) / FILE
    try:
        raw = json.loads(path.read_text())
        log_ins = {str(name): LogIn(**each) for name, each in raw["log_ins"].items()}
        return Contexts(log_ins, raw["current"])
    except OSError:
        return Contexts()
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise UsageError(f"{path} cannot be read ({exc}); remove it and log in again") from exc


def write_contexts(contexts: Contexts, environ: Mapping[str, str] = os.environ) -> Path:
    """Replace the file, which only its owner can read; return its path."""
    path = home_directory(environ) / FILE
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # as a service demands of it
    draft = path.with_name(f".{FILE}.{os.getpid()}")
    body = {
        "current": contexts.current,
        "log_ins": {name: asdict(each) for name, each in contexts.log_ins.items()},
    }
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(json.dumps(body, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path
