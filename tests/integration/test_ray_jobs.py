"""The adapter against a real dashboard: what Ray really answers."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from service.cluster.cluster_view import ClusterNote
from service.cluster.ray_jobs import (
    Job,
    JobNotFound,
    JobStatus,
    RayEndpoint,
    RayJobs,
    RayRefused,
    RayUnavailable,
)
from service.embedded.cluster import EmbeddedCluster
from service.settings import Settings


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ClusterNote, str]]:
    settings = Settings(home=tmp_path_factory.mktemp("home"), nodes=1, cpus_per_node=2)
    embedded = EmbeddedCluster(settings)
    try:
        yield embedded.ensure_running(), embedded.token()
    finally:
        embedded.stop()


@pytest.fixture
async def ray(cluster: tuple[ClusterNote, str]) -> AsyncIterator[RayJobs]:
    note, token = cluster
    assert note.dashboard_url is not None
    endpoint = RayEndpoint(note.dashboard_url, token)
    async with RayJobs(lambda: endpoint) as made:
        yield made


async def until(ray: RayJobs, job_id: str, *statuses: JobStatus) -> Job:
    deadline = time.monotonic() + 60
    while (job := await ray.job(job_id)).status not in statuses:
        assert time.monotonic() < deadline, f"{job_id} is still {job.status}"
        await asyncio.sleep(0.1)
    return job


async def test_one_id_makes_one_job_however_often_it_is_submitted(
    ray: RayJobs, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    command = f"echo started >> {marks}; sleep 1"
    ids = await asyncio.gather(
        *(
            ray.submit("run_once-s001", command, {"run_id": "run_once", "submission": "1"})
            for _ in range(4)
        )
    )
    assert set(ids) == {"run_once-s001"}
    job = await until(ray, "run_once-s001", JobStatus.SUCCEEDED)
    assert await ray.submit("run_once-s001", command, {}) == "run_once-s001"
    assert marks.read_text() == "started\n"
    assert job.metadata["run_id"] == "run_once"
    assert job.driver_exit_code == 0
    assert [one.submission_id for one in await ray.jobs()].count("run_once-s001") == 1


async def test_a_job_that_fails_is_failed_by_ray_s_word(ray: RayJobs) -> None:
    await ray.submit("run_fails-s001", "exit 7", {})
    job = await until(ray, "run_fails-s001", JobStatus.FAILED)
    assert job.driver_exit_code == 7
    assert job.status.ended


async def test_stop_ends_the_driver_by_interrupting_it(ray: RayJobs, tmp_path: Path) -> None:
    begun, interrupted = tmp_path / "begun", tmp_path / "interrupted"
    code = (
        f"import time, pathlib\ntry:\n  pathlib.Path({str(begun)!r}).touch()\n  time.sleep(600)\n"
        f"except KeyboardInterrupt:\n  pathlib.Path({str(interrupted)!r}).touch()"
    )
    script = tmp_path / "driver.py"
    script.write_text(code)
    await ray.submit("run_stops-s001", f"python {script}", {})
    deadline = time.monotonic() + 60
    while not begun.exists():
        assert time.monotonic() < deadline, "the driver did not begin"
        await asyncio.sleep(0.1)
    await ray.stop("run_stops-s001")
    await until(ray, "run_stops-s001", JobStatus.STOPPED)
    assert interrupted.exists(), "SIGINT, which Train takes for a clean abort"
    await ray.stop("run_stops-s001")


async def test_a_driver_finds_the_cluster_the_token_and_no_runtime_env(
    ray: RayJobs, tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    script = tmp_path / "driver.py"
    script.write_text(
        "import json, ray, sys\n"
        "ray.init(logging_level='ERROR')\n"
        "@ray.remote\n"
        "def where(): return sys.prefix\n"
        "env = ray.get_runtime_context().get_runtime_env_string()\n"
        "json.dump({'python': sys.prefix, 'worker': ray.get(where.remote()), 'env': env}, "
        f"open({str(found)!r}, 'w'))\n"
    )
    await ray.submit("run_env-s001", f"python {script}", {"run_id": "run_env"})
    await until(ray, "run_env-s001", JobStatus.SUCCEEDED)
    facts = json.loads(found.read_text())
    assert facts["python"] == facts["worker"]
    assert json.loads(facts["env"]) == {}


async def test_what_is_not_there_and_what_is_wrong_have_their_own_errors(
    ray: RayJobs, cluster: tuple[ClusterNote, str]
) -> None:
    with pytest.raises(JobNotFound, match="run_none"):
        await ray.job("run_none-s001")
    with pytest.raises(JobNotFound):
        await ray.stop("run_none-s001")
    assert cluster[0].dashboard_url is not None
    wrong, nobody = (
        RayEndpoint(cluster[0].dashboard_url, "wrong"),
        RayEndpoint("http://127.0.0.1:9", None),
    )
    async with (
        RayJobs(lambda: wrong) as refused,
        RayJobs(lambda: nobody) as away,
        RayJobs(lambda: None) as none,
    ):
        with pytest.raises(RayRefused, match="RAY_AUTH_TOKEN"):
            await refused.jobs()
        with pytest.raises(RayUnavailable, match=r"127\.0\.0\.1:9"):
            await away.version()
        with pytest.raises(RayUnavailable):
            await none.version()


async def test_nodes_and_version(ray: RayJobs, cluster: tuple[ClusterNote, str]) -> None:
    assert (await ray.version()) == importlib.metadata.version("ray")
    nodes = await ray.nodes()
    assert sorted((node.is_head, node.state, node.resources.get("CPU", 0.0)) for node in nodes) == [
        (False, "ALIVE", 2.0),
        (True, "ALIVE", 0.0),
    ]
    assert {node.node_id for node in await ray.live_nodes()} == {
        node.node_id for node in cluster[0].nodes
    }
