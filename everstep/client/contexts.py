"""Services that this user has logged in to: a file of URLs and tokens that only its owner can
read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from everstep.errors import UsageError
from everstep.home import home_directory

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
