"""When a service starts although its Ray cluster does not answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from service.cluster.ray_jobs import RayJobs, RayRefused, RayUnavailable
from service.process.app import reach
from service.settings import CannotStart, Settings


class Ray:
    """Answers its version, or fails as it is told."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.answer = "2.60.0"

    async def version(self) -> str:
        if self.problem is not None:
            raise self.problem
        return self.answer


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


async def test_a_cluster_of_another_ray_is_refused_with_the_way_out(tmp_path: Path) -> None:
    ray, settings = Ray(), Settings(home=tmp_path, ray_address="head:8265")
    for answer in ("2.57.1", "2.61.0"):
        ray.answer = answer
        with pytest.raises(CannotStart, match=rf"head:8265 has ray {answer}.* 2\.58 to 2\.60"):
            await reach(cast(RayJobs, ray), settings)
    ray.answer = "2.58.0"
    await reach(cast(RayJobs, ray), settings)


def test_a_machine_without_a_loopback_is_refused_at_once(tmp_path: Path) -> None:
    apart = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no network namespace of its own")
    done = subprocess.run(
        [*apart, sys.executable, "-m", "everstep.cli.main", "serve", "--port", "0"],
        env={**os.environ, "EVERSTEP_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "cannot connect to itself at 127.0.0.1" in done.stderr
    assert "ip link set lo up" in done.stderr
