"""Give up the start of a group that takes too long, or in which a rank is stopped or gone."""

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


class StartLimit:
    """When a start has to end. It may be moved forward while the start is watched."""

    def __init__(self, limit_s: float) -> None:
        self._at = time.monotonic() + limit_s
        self.changed = threading.Event()
        """Set when the limit has moved, and when the start has ended."""
        self.ended = False

    def within(self, seconds: float) -> None:
        """Let the start end within so many seconds from now, if not earlier."""
        self._at = min(self._at, time.monotonic() + seconds)
        self.changed.set()

    def left_s(self) -> float:
        """Return the seconds that are left; 0 once the start is overdue."""
        return max(0.0, self._at - time.monotonic())


@contextlib.contextmanager
def watched_start(
    limit_s: float, find_stopped: Callable[[], Reports], give_up: Callable[[Reports], None]
) -> Iterator[StartLimit]:
    """Watch the start that runs in this context, from a thread.

    Which ranks answer does not show which one holds up the others, since all wait for each other.
    Their nodes know which are stopped.

    Args:
        limit_s: longest start in seconds.
        find_stopped: returns a report on each rank; stopped ones are ``unresponsive``, and those
            whose process is gone ``died``.
        give_up: called with these reports. It must kill the group's actors, so that the start fails
            at once.
    """
    limit = StartLimit(limit_s)

    def watch() -> None:
        while not limit.ended:
            if limit.changed.wait(min(_LOOK_S, limit.left_s())):
                limit.changed.clear()
                continue
            reports = find_stopped()
            overdue = limit.left_s() == 0.0
            if limit.ended or not (
                overdue or any(each.unresponsive or each.died for each in reports)
            ):
                continue
            why = (
                "takes too long to start" if overdue else "waits for a rank that is stopped or gone"
            )
            logger.warning("the worker group %s; killing its processes", why)
            give_up(reports)
            return

    threading.Thread(target=watch, name="start-watch", daemon=True).start()
    try:
        yield limit
    finally:
        limit.ended = True
        limit.changed.set()
