"""A reconciler's world with its fake dashboard, for tests that make whole ticks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_ray import FakeRay, serving
from tests.support.reconciler_world import World, world

SetPatience = Callable[[float], None]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> SetPatience:
    """Sets the seconds for which a tick waits for Ray and for what it began itself."""

    def set_to(seconds: float) -> None:
        for part in ("ray_poller", "execute"):
            monkeypatch.setattr(f"service.reconciler.{part}.PATIENCE_S", seconds)

    return set_to


@pytest.fixture
def whole_ticks(patience: SetPatience, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tick asks Ray and the lease everything and ends what it began, so that a test knows
    what the next tick sees."""
    patience(60.0)
    for interval in (
        "ray_poller.POLL_INTERVAL_S",
        "ray_poller.SWEEP_INTERVAL_S",
        "loop.RENEW_S",
    ):
        monkeypatch.setattr(f"service.reconciler.{interval}", 0.0)


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    with serving(FakeRay()) as made:
        yield made


@pytest.fixture
async def here(tmp_path: Path, ray: FakeRay) -> AsyncIterator[World]:
    async with world(tmp_path, ray.url) as made:
        yield made
