"""``python -m service.process.serve``: one service process, as its environment says. ``everstep
serve`` becomes this one, and passes on its options so.

Exit code 0 means a graceful stop (SIGTERM, SIGINT), which also ends each process of the embedded
cluster. Exit code 2 means that the settings or the machine do not allow a start; the message says
what to do. A SIGKILL leaves the embedded cluster and its runs alone, and the next start adopts
them.

The embedded cluster starts beside the imports of the API, which this module therefore leaves to
`serving`, and beside the API itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import structlog

from everstep.options.model import SettingsError
from everstep.spec.plain_text import printable_lines
from everstep.text.words import count
from service.db.engine import DatabaseError
from service.embedded.cluster import ClusterError
from service.process.app import database_lock, opened, running_cluster
from service.process.http import check_tls, listening
from service.process.logs import configure_logging
from service.settings import CannotStart, HomeError, HomeLock, Settings
from storage.errors import StorageError

EXIT_CANNOT_START = 2

log = structlog.get_logger("everstep")


def main() -> int:
    """Serve until a signal. Return the exit code."""
    cannot_start = (
        CannotStart,
        SettingsError,
        HomeError,
        ClusterError,
        StorageError,
        DatabaseError,
    )
    try:
        settings = Settings.of_process(os.environ)
        configure_logging(settings.log_format, settings.log_level)
        with (
            interruptible(),
            HomeLock(settings),
            database_lock(settings),
            listening(settings) as listener,
        ):
            check_tls(settings)
            starting("storage and database")
            storage, database = opened(settings)
            if settings.embedded:
                starting(f"a Ray cluster of {count(settings.nodes, 'node')} on this machine")
            with running_cluster(settings) as supervisor:
                starting("the API")
                from service.process.serving import run

                run(settings, listener, storage, database, supervisor)
    except cannot_start as exc:
        print(f"everstep serve: {printable_lines(str(exc))}", file=sys.stderr)
        return EXIT_CANNOT_START
    except Stopped:
        log.info("stopped before the service was up")
    return 0


class Stopped(SystemExit):
    """A signal asked for the end while the service starts.

    It is no KeyboardInterrupt: where that passes through ``exec``, as in imports that make classes,
    CPython ends the process by SIGINT afterwards, although it was caught.
    """


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGINT raise Stopped until the event loop handles signals."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Stopped(0)

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def starting(what: str) -> None:
    """Tell a person at a terminal what the start takes its time for."""
    if sys.stdout.isatty():
        print(f"Starting:          {what} …", flush=True)


if __name__ == "__main__":
    sys.exit(main())
