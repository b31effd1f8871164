"""Give up the start of a group that takes too long, or in which a rank is stopped."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from train_fn.recovery.evidence import RankReport

_LOOK_S = 10.0
"""Interval in seconds between two checks for stopped ranks."""

logger = logging.getLogger(__name__)

Reports = tuple[RankReport, ...]


@contextlib.contextmanager
def watched_start(
    limit_s: float, find_stopped: Callable[[], Reports], give_up: Callable[[Reports], None]
) -> Iterator[None]:
    """Watch the start that runs in this context, from a thread.

    Which ranks answer does not show which one holds up the others, since all wait for each other.
    Their nodes know which are stopped.

    Args:
        limit_s: longest start in seconds.
        find_stopped: returns a report on each rank; stopped ones are ``unresponsive``.
        give_up: called with these reports. It must kill the group's actors, so that the start fails
            at once.
    """
    ended = threading.Event()
    overdue_at = time.monotonic() + limit_s

    def watch() -> None:
        while not ended.wait(max(0.0, min(_LOOK_S, overdue_at - time.monotonic()))):
            reports = find_stopped()
            overdue = time.monotonic() >= overdue_at
            if ended.is_set() or not (overdue or any(each.unresponsive for each in reports)):
                continue
            why = (
                f"did not start within {limit_s:g} s"
                if overdue
                else "waits for a rank that is stopped"
            )
            logger.warning("the worker group %s; killing its processes", why)
            give_up(reports)
            return

    threading.Thread(target=watch, name="start-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
