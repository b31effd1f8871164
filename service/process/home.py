"""The service's home directory: its creation, its lock, and its URL for clients on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from service.settings import Settings
from storage.files.protocol import draft_beside

log = structlog.get_logger(__name__)


class HomeError(Exception):
    """The home directory cannot be used. The message says why and what to do."""


class HomeLock:
    """Locks a home directory for one service process. The lock ends with the process.

    Entering raises HomeError if the directory cannot be written, if other users may write it, or if
    another service holds it.
    """

    def __init__(self, settings: Settings) -> None:
        self._home = settings.home
        self._path = settings.lock_path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_open_home(self._home)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise HomeError(
                f"the home directory {self._home} cannot be used ({exc.strerror}); choose one "
                "that you can write with EVERSTEP_HOME"
            ) from exc
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise HomeError(
                f"a service (pid {holder or 'unknown'}) already runs on {self._home}; stop it "
                f"with `kill {holder or 'PID'}`, "
                "or give this one another home with EVERSTEP_HOME"
            ) from exc
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The file stays: otherwise two services could lock two files of one name.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def refuse_open_home(home: Path) -> None:
    """Raise HomeError if other users may write the home directory, as ssh does for its keys.

    Whoever can replace a file there can give the service a token or a cluster of their own. A
    directory of root's that nobody else may write is accepted. If the group may write, which may
    be this user's alone, only a warning is logged. Raises OSError.
    """
    found = home.stat()
    way_out = (
        f"make it yours alone with `chown {os.geteuid()} {home}` and `chmod 700 {home}`, or choose "
        f"another with EVERSTEP_HOME, for example {home / 'own'}, which the service creates"
    )
    if found.st_uid not in (0, os.geteuid()):
        raise HomeError(
            f"the home directory {home} belongs to another user ({_user(found.st_uid)}), who could "
            f"replace the administrator's token and the cluster's files in it; {way_out}"
        )
    if found.st_mode & stat.S_IWOTH:
        raise HomeError(
            f"every user of this machine may write in the home directory {home} (mode "
            f"{stat.S_IMODE(found.st_mode):04o}), and so replace the administrator's token and the "
            f"cluster's files in it; {way_out}"
        )
    if found.st_mode & stat.S_IWGRP:
        log.warning(
            "group members may replace the tokens in the home directory; run chmod g-w on it",
            home=str(home),
            mode=f"{stat.S_IMODE(found.st_mode):04o}",
            group=found.st_gid,
        )


def _user(uid: int) -> str:
    """Return a user's name and number, or only the number."""
    try:
        return f"{pwd.getpwuid(uid).pw_name}, uid {uid}"
    except KeyError:
        return f"uid {uid}"


@contextlib.contextmanager
def published_url(path: Path, url: str) -> Iterator[None]:
    """Publish the service's URL to clients on this machine while it runs."""
    with draft_beside(path) as draft:
        Path(draft).write_text(f"{url}\n")
        Path(draft).replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
