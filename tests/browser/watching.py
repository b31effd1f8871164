"""A browser whose console a test watches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import BrowserContext, ConsoleMessage, async_playwright

from tests.browser.chromium import chromium_path
from tests.browser.log_in import session_cookie


@asynccontextmanager
async def watching(url: str, token: str) -> AsyncIterator[BrowserContext]:
    """A browser that is logged in; what its console says beyond what a test expects is a
    failure."""
    said: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # of tests that ask for what is missing, or cut the line
        expected = ("Failed to load resource", "htmx:")
        if message.type in ("error", "warning") and not message.text.startswith(expected):
            said.append(message.text)

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium_path(), args=["--no-sandbox"]
        )
        found = await browser.new_context(base_url=url, viewport={"width": 1360, "height": 900})
        await found.add_cookies([await session_cookie(url, token)])
        found.on("console", note)
        found.on("weberror", lambda error: said.append(str(error.error)))
        yield found
        await browser.close()
    assert said == []
