"""Make the screenshots of the README: ``python -m scripts.screenshots [DIRECTORY]`` (default
``docs/images``).

Needs Chromium and the ``dev`` extra. The service is real, the history told by
tests/browser/story.py, so that the pictures are the same each time; ``--all`` takes every page in
both themes.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from playwright.async_api import async_playwright

from tests.browser.chromium import chromium_path
from tests.browser.log_in import session_cookie
from tests.browser.story import Story, story_token, tell
from tests.support.api_service import ApiService

README_SHOTS = {"run": "light", "runs": "dark"}


def pages(story: Story) -> dict[str, str]:
    """Address of each page by its picture's name."""
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


async def take(directory: Path, *, every: bool) -> None:
    with tempfile.TemporaryDirectory() as home:
        async with ApiService(Path(home)) as api, async_playwright() as playwright:
            story = await tell(api)
            browser = await playwright.chromium.launch(
                executable_path=chromium_path(), args=["--no-sandbox"]
            )
            for theme in ("light", "dark"):
                context = await browser.new_context(
                    base_url=api.url, viewport={"width": 1280, "height": 800}, color_scheme=theme
                )
                await context.add_cookies([await session_cookie(api.url, story_token(api))])
                page = await context.new_page()
                for name, address in pages(story).items():
                    if not every and README_SHOTS.get(name) != theme:
                        continue
                    await page.goto(address)
                    if await page.locator("#charts").count():
                        await page.locator("figure.chart").first.wait_for()
                        await page.wait_for_timeout(300)
                    path = directory / (f"{name}-{theme}.png" if every else f"{name}.png")
                    await page.screenshot(path=path, full_page=every or name == "run")
                    print(path)
            await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("docs/images"))
    parser.add_argument("--all", action="store_true", help="every page, light and dark")
    args = parser.parse_args()
    if chromium_path() is None:
        parser.error(
            "no Chromium was found; install it (apt-get install chromium) or name it with "
            "EVERSTEP_CHROMIUM"
        )
    args.directory.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(args.directory, every=args.all))


if __name__ == "__main__":
    main()
