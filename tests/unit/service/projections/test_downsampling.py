"""How long series are thinned for a page."""

from __future__ import annotations

from service.db.events import MIN_POINTS, downsample
from tests.support.api_service import NOON


def test_thinning_keeps_extremes_and_ends() -> None:
    points = [(step, NOON + step, float(step % 7)) for step in range(10_000)]
    points[5432] = (5432, NOON + 5432, 1e6)
    points[77] = (77, NOON + 77, -1e6)
    points[4000] = (4000, NOON + 4000, None)
    for max_points in (MIN_POINTS, 5, 50, 500, 9_999):
        thin = downsample(points, max_points)
        assert len(thin) <= max_points
        assert {points[5432], points[77]} <= set(thin), max_points
        assert (thin[0], thin[-1]) == (points[0], points[-1])
        assert thin == sorted(thin, key=lambda point: point[0])
        if max_points >= 5:
            assert points[4000] in thin
    assert downsample(points, 10_000) == points
    assert downsample([], 10) == []
