"""Ray's dashboard of a real cluster, through the service's log-in, in a real browser."""

from __future__ import annotations

import asyncio
import re

import pytest
from playwright.async_api import expect

from everstep.client.runs import RunHandle
from tests.browser.chromium import chromium_path
from tests.browser.watching import watching
from tests.support.digits_run import digits, wait_for_step
from tests.support.service_process import ServiceProcess, wait_for

pytestmark = pytest.mark.skipif(
    chromium_path() is None, reason="needs Chromium: apt-get install chromium"
)


def training(service: ServiceProcess) -> RunHandle:
    run = service.client().runs.create(digits("seen in Ray", epochs=10_000))
    wait_for_step(run, 5)
    return run


@pytest.mark.chaos
async def test_from_a_run_to_its_ray_job_its_flame_graph_and_back(
    service: ServiceProcess,
) -> None:
    run = await asyncio.to_thread(training, service)
    worker = (await asyncio.to_thread(run.attempts))[-1].workers[0]
    async with watching(service.url, service.token) as context:
        page = await context.new_page()
        await page.goto(f"/runs/{run.id}")
        await page.get_by_role("link", name="Ray job").click()
        await expect(page).to_have_url(f"{service.url}/ray/#/jobs/{run.id}-s001")
        body = page.locator("#root")
        await expect(body).to_contain_text(f"{run.id}-s001", timeout=60_000)
        await expect(body).to_contain_text(re.compile("RUNNING", re.IGNORECASE))
        # its own data are there too: the nodes
        await page.goto("/ray/#/cluster")
        await expect(body).to_contain_text(worker.node_id[:5], timeout=60_000)
        profile = (
            f"worker/cpu_profile?pid={worker.pid}&ip={worker.node_ip}&node_id={worker.node_id}"
            "&duration=1&format=flamegraph"
        )
        async with context.expect_page(timeout=60_000) as opened:
            await page.evaluate(
                """(href) => { const link = document.createElement("a");
                Object.assign(link, {href, target: "_blank", rel: "noreferrer"});
                document.body.append(link); link.click(); }""",
                profile,
            )
        flame = await opened.value
        await expect(flame.locator("svg #frames")).to_contain_text("attempt.py", timeout=60_000)
        # what the cluster sends acts without the log-in
        assert await flame.evaluate("window.origin") == "null"
        await page.goto(f"/ray/#/jobs/{run.id}-s001")
        await page.get_by_role("link", name="Everstep").click()
        await expect(page).to_have_url(f"{service.url}/runs/{run.id}")
        stopped = await page.request.post(f"/ray/api/jobs/{run.id}-s001/stop")
        assert stopped.status == 405
    assert (await asyncio.to_thread(run.refresh)).status == "RUNNING"
    await asyncio.to_thread(run.cancel)
    await asyncio.to_thread(
        wait_for, lambda: run.refresh().status == "CANCELLED", 120, "the cancel"
    )
