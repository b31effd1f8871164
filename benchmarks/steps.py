"""A run's steps by the ranks' own clocks, and those on either side of a fault."""

from __future__ import annotations

import itertools

from everstep.client.runs import RunHandle
from tests.support.service_process import wait_for

Point = tuple[int, float]
"""(steps done, unix seconds)."""


def attempts_of(run: RunHandle) -> dict[Point, int]:
    """Every step done, with the attempt that did it.

    An attempt reports steps of the one before it again, since they may never have arrived. Their
    times lie before its own start, by the clock of the rank whose state it resumes from.
    """
    found: dict[Point, int] = {}
    first: dict[int, int] = {}
    began: dict[int, float] = {}
    for event in run.events():
        if event.kind == "attempt_started":
            began[event.attempt] = event.at.timestamp()
        for point in event.data["points"] if event.kind == "metrics" else ():
            attempt = first.setdefault(point["step"], event.attempt)
            if attempt == event.attempt or point["at"] >= began[event.attempt]:
                found.setdefault((point["step"], point["at"]), event.attempt)
    return found


def points(run: RunHandle, after: float) -> list[tuple[int, Point]]:
    """(attempt, point) of every step done after a time, and of the last before it, in the order of
    their time."""
    found = sorted(
        ((number, point) for point, number in attempts_of(run).items()), key=lambda item: item[1][1]
    )
    earlier = [item for item in found if item[1][1] <= after]
    return earlier[-1:] + [item for item in found if item[1][1] > after]


STEPS_AFTER = 20
"""Steps of an attempt up to which gaps are measured."""


def longest_gap(run: RunHandle, attempt: int, began: float, timeout_s: float) -> float:
    """Wait for the first steps of an attempt after ``attempt``; the longest time between two steps
    since ``began``, up to these."""
    _, first = around(run, attempt, began, timeout_s)
    through_step = first[0] + STEPS_AFTER

    def found() -> list[float] | None:
        seen = [point for _, point in points(run, began)]
        times = [at for step, at in seen if step <= through_step]
        return times if seen and seen[-1][0] >= through_step else None

    times = wait_for(found, timeout_s, f"step {through_step}")
    return max(after - before for before, after in itertools.pairwise(times))


def around(run: RunHandle, attempt: int, began: float, timeout_s: float) -> tuple[Point, Point]:
    """Wait for the first step of an attempt after ``attempt``, done after ``began``; the last step
    before that one, and it."""

    def found() -> tuple[Point, Point] | None:
        seen = points(run, began)
        older = [point for number, point in seen if number <= attempt or point[1] <= began]
        newer = [point for number, point in seen if number > attempt and point[1] > began]
        return (older[-1], newer[0]) if newer else None

    return wait_for(found, timeout_s, "the first step afterwards")
