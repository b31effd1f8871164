"""The service's home directory: made, locked for one service, and told to clients on this
machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from service.settings import Settings
from storage.files.draft import draft_beside


class HomeError(Exception):
    """The home directory cannot be used; the message says why and the way out."""


class HomeLock:
    """Holds a home directory for one service process, to the process's end whatever ends it.

    Raises HomeError on entering where the directory cannot be written, or another service holds it.
    """

    def __init__(self, settings: Settings) -> None:
        self._home = settings.home
        self._path = settings.lock_path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        # The file stays: removing it would let two services lock two files of one name.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def published_url(path: Path, url: str) -> Iterator[None]:
    """Tell clients on this machine where the service is, for as long as it is there."""
    with draft_beside(path) as draft:
        Path(draft).write_text(f"{url}\n")
        Path(draft).replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
