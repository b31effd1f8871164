"""Start something of the cluster again where it did not start: a machine that is busy takes long,
and then does it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

GIVE_UP_S: Final = 150.0
"""Nothing is given up before so long, however often it failed."""
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
"""What a wrong setting or installation raises: it would do so every time."""

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
    """Return what ``start`` does, called again for at least GIVE_UP_S where it fails.

    Args:
        what: Its name in messages: "the head".
        start: May raise anything; what a wrong setting raises is raised on at once, and so is the
            last error.
        clear: Remove what a failed start left.
        say: Told what is waited for, for whoever waits for the cluster; None once it is there.
        pause: Waits for some seconds, or until a signal comes.
        is_stopping: Whether to give up, since the cluster is to end.
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
                "%s did not start (try %d, %.0f s so far, %.1f processes a core want to run); "
                "trying again: %s",
                *(what, num_failed, waited_s, load, problem),
            )
            say(f"{what} to start: {num_failed} tries failed so far, the last one with {problem}")
            clear()
            pause(RETRY_S)
        else:
            say(None)
            return found
