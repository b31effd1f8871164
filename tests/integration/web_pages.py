"""Pages of a real service in Chromium, with the history of tests/browser/story.py. Test modules
import ``story``, ``context`` and ``page`` as their fixtures."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import BrowserContext, Page

from tests.browser.story import Story, tell
from tests.browser.watching import watching
from tests.support.api_service import ApiService


@pytest.fixture
async def story(api: ApiService) -> Story:
    return await tell(api)


@pytest.fixture
async def context(api: ApiService) -> AsyncIterator[BrowserContext]:
    async with watching(api.url, api.token("admin")) as found:
        yield found


@pytest.fixture
async def page(context: BrowserContext) -> Page:
    return await context.new_page()
