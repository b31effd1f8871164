"""The last events that a rank reported. They are part of its training state, since the rank that
sends them to the journal may die before it has done so."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from everstep.wire.events import EventKind

NUM_POINTS = 64
"""Steps whose metrics are always kept. Older ones are kept until the journal has them."""
MOST_POINTS = 4096
"""Limit on steps whose metrics are kept in all, for when rank 0 is cut off from the journal."""
NUM_OTHERS = 16
"""Other events (ends of epochs, evaluations) that are always kept. Older ones are kept until the
journal has them. They are separate from metrics, so that short steps do not push out events that
are reported once an epoch."""
MOST_OTHERS = 1024
"""Limit on other events in all."""
_METRICS_KIND = EventKind.METRICS.value


class EventTail:
    """Keep a rank's last events.

    An entry is ``{"kind": …, "at": Unix time in seconds, "data": …}`` and can be written as JSON.
    """

    def __init__(self, entries: list[dict[str, Any]] | None = None) -> None:
        self.points: deque[dict[str, Any]] = deque()
        """Metrics events. Every step appends one (``add_point``)."""
        self.others: deque[dict[str, Any]] = deque()
        """Events between steps (``add_other``)."""
        for entry in entries or ():
            (self.points if entry["kind"] == _METRICS_KIND else self.others).append(entry)

    def add_point(self, entry: dict[str, Any], journaled_step: Callable[[], float]) -> None:
        """Append a step's metrics, and drop the oldest that need not be kept.

        Args:
            journaled_step: returns the newest step that the journal has.
        """
        points = self.points
        points.append(entry)
        while len(points) > NUM_POINTS and (
            len(points) > MOST_POINTS or points[0]["data"]["step"] <= journaled_step()
        ):
            points.popleft()

    def add_other(self, entry: dict[str, Any], journaled_step: Callable[[], float]) -> None:
        """Append an event between steps, and drop the oldest as ``add_point`` does.

        ``entry`` also has a ``step``. Entries from older versions have none, and are dropped beyond
        NUM_OTHERS.
        """
        others = self.others
        others.append(entry)
        while len(others) > NUM_OTHERS and (
            len(others) > MOST_OTHERS or others[0].get("step", -1) < journaled_step()
        ):
            others.popleft()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over all entries by time."""
        return iter(sorted((*self.points, *self.others), key=itemgetter("at")))

    def dump(self) -> str:
        """Return all entries as one JSON string. As many small values would add a millisecond to
        each copy of the state at a step boundary."""
        return json.dumps([*self.points, *self.others])
