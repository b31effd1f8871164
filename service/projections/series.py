"""Thin a series without changing its picture: every bucket keeps its extremes."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[int, float, float | None]
"""(step, unix seconds, value); None was not finite."""

MIN_POINTS = 4


def downsample(points: Sequence[Point], max_points: int) -> list[Point]:
    """Return at most ``max_points`` points, in order: the first, the last, and of each bucket the
    smallest and largest value, and one that is not finite if there is one.

    Args:
        points: In order of steps.
        max_points: At least MIN_POINTS.
    """
    if len(points) <= max_points:
        return list(points)
    inner = range(1, len(points) - 1)
    per_bucket = 3 if any(points[index][2] is None for index in inner) else 2
    num_buckets = max(1, (max_points - 2) // per_bucket)
    keep = {0, len(points) - 1}
    for bucket in range(num_buckets):
        keep |= _extremes(
            points,
            inner[bucket * len(inner) // num_buckets : (bucket + 1) * len(inner) // num_buckets],
        )
    # Still too many for one bucket: drop values that are not finite first, keep the extremes.
    while len(keep) > max_points:
        keep.remove(next((index for index in sorted(keep) if points[index][2] is None), max(keep)))
    return [points[index] for index in sorted(keep)]


def _extremes(points: Sequence[Point], indices: Sequence[int]) -> set[int]:
    """Return the indices of the smallest and largest value and of the first that is not finite."""
    finite = [(value, index) for index in indices if (value := points[index][2]) is not None]
    missing = next((index for index in indices if points[index][2] is None), None)
    found = {min(finite)[1], max(finite)[1]} if finite else set()
    return found if missing is None else found | {missing}
