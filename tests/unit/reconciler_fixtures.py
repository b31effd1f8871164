"""A reconciler's world with its fake dashboard, for tests that make whole ticks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.unit.fake_ray import FakeRay, serving
from tests.unit.reconciler_world import World, world


@pytest.fixture
def always_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tick asks Ray and the lease everything, so that a test knows what the next tick sees."""
    for interval in ("observe.ASK_INTERVAL_S", "observe.SWEEP_INTERVAL_S", "leadership.RENEW_S"):
        monkeypatch.setattr(f"service.reconciler.{interval}", 0.0)


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    with serving(FakeRay()) as made:
        yield made


@pytest.fixture
async def here(tmp_path: Path, ray: FakeRay) -> AsyncIterator[World]:
    async with world(tmp_path, ray.url) as made:
        yield made
