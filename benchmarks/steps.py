"""A run's steps by the ranks' own clocks, and those on either side of a fault."""

from __future__ import annotations

from everstep.runs import RunHandle
from tests.service_process import wait_for

Point = tuple[int, float]
"""(steps done, unix seconds)."""


def points(run: RunHandle, after: float) -> list[tuple[int, Point]]:
    """(attempt, point) of every step done after a time, and of the last before it, in the order of their time.

    An attempt reports again what the one before it may have failed to: a point belongs to the first that reported it.
    """
    attempts: dict[Point, int] = {}
    for event in run.events():
        for point in event.data["points"] if event.kind == "metrics" else ():
            attempts.setdefault((point["step"], point["at"]), event.attempt)
    found = sorted(((number, point) for point, number in attempts.items()), key=lambda item: item[1][1])
    earlier = [item for item in found if item[1][1] <= after]
    return earlier[-1:] + [item for item in found if item[1][1] > after]


def around(run: RunHandle, attempt: int, began: float, timeout_s: float) -> tuple[Point, Point]:
    """Wait for the first step of an attempt after ``attempt``, done after ``began``; the last step before that one, and it."""

    def found() -> tuple[Point, Point] | None:
        seen = points(run, began)
        older = [point for number, point in seen if number <= attempt or point[1] <= began]
        newer = [point for number, point in seen if number > attempt and point[1] > began]
        return (older[-1], newer[0]) if newer else None

    return wait_for(found, timeout_s, "the first step afterwards")
