"""Make the picture of the README, docs/images/run.png: ``python -m scripts.screenshots``.

It runs ``everstep demo``, which kills a node in the middle of a run on this machine, and takes the
run's page. ``--all DIRECTORY`` takes every page in both themes instead, of the made-up history in
tests/browser/story.py: for looking at the design, not for showing what Everstep does. Both need
Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from playwright.async_api import Page, async_playwright

from tests.browser.chromium import chromium_path
from tests.browser.log_in import session_cookie
from tests.browser.story import Story, story_token, tell
from tests.support.api_service import ApiService

RUN_PICTURE = Path(__file__).parents[1] / "docs" / "images" / "run.png"
STOP_TIMEOUT_S = 60.0


def pages(story: Story) -> dict[str, str]:
    """Return the address of each page by its picture's name."""
    run = f"/runs/{story.running}"
    return {
        "runs": "/runs",
        "run": run,
        "checkpoints": f"{run}/checkpoints",
        "logs": f"{run}/logs",
        "events": f"{run}/events",
        "spec": f"{run}/spec?against={story.finished}",
        "fork": f"{run}/fork",
        "failed": f"/runs/{story.failed}",
        "compare": f"/compare?run={story.finished}&run={story.running}&run={story.failed}",
        "cluster": "/cluster",
        "queue": "/queue",
        "empty": "/runs?search=nothing",
        "missing": "/runs/none",
        "login": "/login",
        "docs": "/docs",
    }


@contextlib.asynccontextmanager
async def browser_page(url: str, token: str, theme: str) -> AsyncIterator[Page]:
    """Yield a page of a new browser that is logged in."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium_path(), args=["--no-sandbox"]
        )
        context = await browser.new_context(
            base_url=url,
            viewport={"width": 1280, "height": 800},
            color_scheme="dark" if theme == "dark" else "light",
        )
        await context.add_cookies([await session_cookie(url, token)])
        yield await context.new_page()
        await browser.close()


async def shoot(page: Page, address: str, path: Path) -> None:
    """Write the picture of one page, with its curves drawn."""
    await page.goto(address)
    if await page.locator("#charts").count():
        await page.locator("figure.chart").first.wait_for()
        await page.wait_for_timeout(300)
    await page.screenshot(path=path, full_page=True)
    print(path)


async def take_all(directory: Path) -> None:
    """Write a picture of every page in both themes, of a history that is made up."""
    with tempfile.TemporaryDirectory() as home:
        async with ApiService(Path(home)) as api:
            story = await tell(api)
            for theme in ("light", "dark"):
                async with browser_page(api.url, story_token(api), theme) as page:
                    for name, address in pages(story).items():
                        await shoot(page, address, directory / f"{name}-{theme}.png")


@contextlib.contextmanager
def finished_demo() -> Iterator[tuple[str, str, str]]:
    """Run the demo, and yield the address of its service, a token and the run's id.

    Raises CalledProcessError where the demo failed.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "everstep.cli.main", "--json", "demo", "--keep"]
        done = subprocess.run([*command, "--out", out], stdout=subprocess.PIPE, check=True)
        demo = json.loads(done.stdout.splitlines()[-1])
        try:
            yield demo["url"], (Path(demo["home"]) / "token").read_text().strip(), demo["run"]["id"]
        finally:
            os.kill(demo["pid"], signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while Path(f"/proc/{demo['pid']}").exists() and time.monotonic() < deadline:
                time.sleep(0.1)


async def take_run() -> None:
    """Write docs/images/run.png, of a run that lost a node a moment ago."""
    with finished_demo() as (url, token, run_id):
        async with browser_page(url, token, "light") as page:
            await shoot(page, f"/runs/{run_id}", RUN_PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, metavar="DIRECTORY", help="every page, light and dark")
    directory: Path | None = parser.parse_args().all
    if chromium_path() is None:
        parser.error(
            "no Chromium was found; install it (apt-get install chromium) or name it with "
            "EVERSTEP_CHROMIUM"
        )
    if directory is None:
        asyncio.run(take_run())
    else:
        directory.mkdir(parents=True, exist_ok=True)
        asyncio.run(take_all(directory))


if __name__ == "__main__":
    main()
