"""When a service starts although its Ray cluster does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from service.cluster.ray_errors import RayRefused, RayUnavailable
from service.cluster.ray_jobs import RayJobs
from service.process.backends import reach
from service.settings import CannotStart, Settings


class Ray:
    """Answers its version, or fails as it is told."""

    def __init__(self) -> None:
        self.problem: Exception | None = None

    async def version(self) -> str:
        if self.problem is not None:
            raise self.problem
        return "2.60.0"


async def test_a_cluster_that_has_answered_before_may_be_away(tmp_path: Path) -> None:
    ray, settings = Ray(), Settings(home=tmp_path, ray_address="head:8265")
    jobs = cast(RayJobs, ray)
    ray.problem = RayUnavailable("no answer")
    with pytest.raises(CannotStart, match="--ray-address"):
        await reach(jobs, settings)
    ray.problem = None
    await reach(jobs, settings)
    ray.problem = RayUnavailable("no answer")
    await reach(jobs, settings)
    with pytest.raises(CannotStart, match="--ray-address"):
        await reach(jobs, Settings(home=tmp_path, ray_address="other:8265"))
    ray.problem = RayRefused("wrong token")
    with pytest.raises(CannotStart, match="wrong token"):
        await reach(jobs, settings)
