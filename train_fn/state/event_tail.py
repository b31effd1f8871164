"""The last events that a rank reported. They travel with its state, since the rank that tells the
journal may die before it has."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from everstep.wire.events import EventKind

NUM_POINTS = 64
"""Metrics of so many steps, and of those before them that the journal does not know of."""
MOST_POINTS = 4096
"""Of so many steps in all: what a rank remembers while rank 0 is cut off from the journal."""
NUM_OTHERS = 16
"""Ends of epochs, evaluations and the like, and those before them that the journal does not know
of. Apart from the metrics: short steps must not push out what is told once an epoch."""
MOST_OTHERS = 1024
"""Of these in all."""
_METRICS_KIND = EventKind.METRICS.value


class EventTail:
    """Entries are ``{"kind": …, "at": unix seconds, "data": …}``, JSON all of it."""

    def __init__(self, entries: list[dict[str, Any]] | None = None) -> None:
        self.points: deque[dict[str, Any]] = deque()
        """Those of metrics. Every step appends one (``add_point``)."""
        self.others: deque[dict[str, Any]] = deque()
        """What happened between steps (``add_other``)."""
        for entry in entries or ():
            (self.points if entry["kind"] == _METRICS_KIND else self.others).append(entry)

    def add_point(self, entry: dict[str, Any], told_step: Callable[[], float]) -> None:
        """Append a step's metrics, and let go of the oldest that need not travel any more.

        Args:
            told_step: Return the newest step that the journal knows of.
        """
        points = self.points
        points.append(entry)
        while len(points) > NUM_POINTS and (
            len(points) > MOST_POINTS or points[0]["data"]["step"] <= told_step()
        ):
            points.popleft()

    def add_other(self, entry: dict[str, Any], told_step: Callable[[], float]) -> None:
        """Append what happened between steps, and let go of the oldest as ``add_point`` does.

        ``entry`` holds the step, too. Of entries of older versions, which do not, none is kept
        beyond NUM_OTHERS.
        """
        others = self.others
        others.append(entry)
        while len(others) > NUM_OTHERS and (
            len(others) > MOST_OTHERS or others[0].get("step", -1) < told_step()
        ):
            others.popleft()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """By time."""
        return iter(sorted((*self.points, *self.others), key=itemgetter("at")))

    def dump(self) -> str:
        """As one value: as many small ones as these take a boundary's copy a millisecond."""
        return json.dumps([*self.points, *self.others])
