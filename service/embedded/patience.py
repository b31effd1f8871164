"""Retry the start of a part of the cluster: a busy machine may need several tries."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

GIVE_UP_S: Final = 150.0
"""Shortest time for retries, however often the start fails."""
RETRY_S: Final = 3.0
_LASTING: Final = (
    ValueError,
    TypeError,
    LookupError,
    ImportError,
    AttributeError,
    FileNotFoundError,
    PermissionError,
)
"""Errors of a wrong setting or installation, which every try would raise."""

log = logging.getLogger("keeper")


def start_patiently(
    what: str,
    start: Callable[[], T],
    *,
    clear: Callable[[], None],
    say: Callable[[str | None], None],
    pause: Callable[[float], None],
    is_stopping: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Call ``start`` until it succeeds, for at least GIVE_UP_S, and return its result.

    Raises the last error, and at once one that a wrong setting causes.

    Args:
        what: Name in messages, for example "the head".
        start: May raise anything.
        clear: Removes what a failed start left.
        say: Receives what is waited for, and None after the start.
        pause: Waits for some seconds, or until a signal.
        is_stopping: Whether the cluster is ending, so that retries end too.
        clock: Seconds.
    """
    began, num_failed = clock(), 0
    say(f"{what} to start")
    while True:
        try:
            found = start()
        except Exception as exc:
            num_failed += 1
            waited_s = clock() - began
            if is_stopping() or isinstance(exc, _LASTING) or waited_s >= GIVE_UP_S:
                raise
            problem = f"{type(exc).__name__}: {exc}"[:300]
            load = os.getloadavg()[0] / (os.cpu_count() or 1)
            log.warning(
                "%s did not start (try %d, %.0f s so far, load of %.1f a core); trying again: %s",
                *(what, num_failed, waited_s, load, problem),
            )
            say(f"{what} to start: {num_failed} tries failed so far, the last one with {problem}")
            clear()
            pause(RETRY_S)
        else:
            say(None)
            return found


# ---------------------------------------------------------------- keeper arguments

# The keeper's command line.


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; ``argv`` None reads those of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m service.embedded.keeper",
        description="Start the nodes of a Ray cluster, watch them, and end them on SIGTERM.",
    )
    parser.add_argument("home", type=Path, help="the service's home directory")
    parser.add_argument(
        "--temp-dir", required=True, help="the cluster's own directory, which exists"
    )
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--cpus-per-node", type=int, required=True)
    parser.add_argument("--node-return-s", type=float, default=0.0)
    parser.add_argument(
        "--adopt", action="store_true", help="take over the running cluster of cluster.json"
    )
    return parser.parse_args(argv)
