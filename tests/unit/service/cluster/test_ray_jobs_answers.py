"""What the adapter makes of answers that a real dashboard gives seldom."""

from __future__ import annotations

import httpx
import pytest

from everstep.wire import NodeLoad
from service.cluster.ray_jobs import (
    JobRejected,
    RayEndpoint,
    RayJobs,
    RayRefused,
    RayUnavailable,
)
from tests.support.fake_ray import FakeRay, serving


async def test_answers_become_errors_that_say_what_happened() -> None:
    with serving(FakeRay()) as fake:
        endpoint = RayEndpoint(fake.url, fake.token)
        async with RayJobs(lambda: endpoint) as ray:
            with pytest.raises(JobRejected, match="entrypoint must not be empty"):
                await ray.submit("run_a-s001", "", {})
            assert await ray.submit("run_a-s001", "true", {}) == "run_a-s001"
            assert await ray.submit("run_a-s001", "true", {}) == "run_a-s001", (
                "exists already: fetched"
            )
            fake.broken = True
            for call in (
                ray.version(),
                ray.jobs(),
                ray.job("run_a-s001"),
                ray.submit("run_b-s001", "true", {}),
                ray.nodes(),
            ):
                with pytest.raises(RayUnavailable, match=r"500 .*something broke"):
                    await call
            fake.broken, fake.token = False, "another"
            with pytest.raises(RayRefused):
                await ray.version()


async def test_nodes_carry_hostnames_and_drains() -> None:
    with serving(FakeRay()) as fake:
        fake.nodes.append(fake.node("n2", {"CPU": 1.0}, state="DEAD"))
        async with RayJobs(lambda: RayEndpoint(fake.url, fake.token)) as ray:
            found = {
                node.node_id: (node.state, node.hostname, node.is_head)
                for node in await ray.nodes()
            }
    assert found == {
        "head": ("ALIVE", "10.0.0.1", True),
        "n1": ("DRAINING", "host-a", False),
        "n2": ("DEAD", "10.0.0.1", False),
    }


async def test_nodes_carry_their_load_and_what_is_used() -> None:
    with serving(FakeRay()) as fake:
        fake.load = {
            "cpu": 37.5,
            "mem": [1000, 600, 40.0, 400],
            "loadAvg": [[1.5, 1.0, 0.5], [0.75, 0.5, 0.25]],
            "gpus": [
                {"utilizationGpu": 50, "memoryUsed": 10, "memoryTotal": 20},
                {"utilizationGpu": None, "memoryUsed": 1, "memoryTotal": 20},
            ],
        }
        fake.used = {
            "n1": "1.5/2.0 CPU (1.0 used of 1.0 reserved in placement groups)\n0B/1.00GiB memory"
        }
        async with RayJobs(lambda: RayEndpoint(fake.url, fake.token)) as ray:
            head, n1 = await ray.nodes()
            assert (head.load, head.used) == (None, None)
            assert n1.used == {"CPU": 1.5} and n1.load == NodeLoad(
                cpu=0.375,
                load_1m=1.5,
                memory_used_bytes=400,
                memory_total_bytes=1000,
                gpu=0.5,
                gpu_memory_used_bytes=11 << 20,
                gpu_memory_total_bytes=40 << 20,
            )
            fake.load = {
                "cpu": "busy",
                "mem": [1000, None, None, 400],
                "loadAvg": None,
                "gpus": [1],
            }
            [_, n1] = await ray.nodes()
            assert n1.load is not None
            assert (n1.load.cpu, n1.load.load_1m, n1.load.gpu) == (None, None, None)
            fake.load = {"mem": {}}
            assert (await ray.nodes())[1].load is None


class Proxy(httpx.AsyncBaseTransport):
    """Answers everything by itself."""

    def __init__(self, status: int, text: str) -> None:
        self.answer = status, text

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        status, text = self.answer
        return httpx.Response(status, text=text, request=request)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (404, "default backend - 404"),
        (200, "<html>maintenance</html>"),
        (200, "{}"),
        (200, '[{"submission_id": "a", "status": "?"}]'),
    ],
)
async def test_what_answers_in_ray_s_place_is_not_believed(status: int, text: str) -> None:
    """Above all not that it knows no job: a driver that lives would be replaced."""
    async with RayJobs(lambda: RayEndpoint("http://ray.example", None)) as ray:
        ray._client = httpx.AsyncClient(transport=Proxy(status, text))
        for call in (ray.job("a"), ray.jobs(), ray.version(), ray.live_nodes(), ray.nodes()):
            with pytest.raises(RayUnavailable):
                await call
        if status == 404:
            with pytest.raises(RayUnavailable):
                await ray.stop("a")
