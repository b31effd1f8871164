"""The page of a sweep in a real browser, while its runs begin and end."""

from __future__ import annotations

import pytest
from playwright.async_api import Page, expect

from tests.browser.chromium import chromium_path
from tests.integration.web_pages import context, page
from tests.support.api_service import ApiService
from tests.support.sweep_runs import advance, create_sweep, train

__all__ = ["context", "page"]

expect.set_options(timeout=60_000)

pytestmark = pytest.mark.skipif(
    chromium_path() is None, reason="needs Chromium: apt-get install chromium"
)


async def test_a_page_that_was_opened_before_any_run_began_shows_curves_and_the_best(
    api: ApiService, page: Page
) -> None:
    made = await create_sweep(api)
    await page.goto(f"/sweeps/{made['id']}")
    await expect(page.get_by_text("not submitted")).to_have_count(2)
    advance(api)
    runs = (await api.get(f"/v1/sweeps/{made['id']}/runs"))["items"]
    train(api, runs[0]["run_id"], 0.5)
    advance(api)
    await expect(page.locator("figure.chart").first).to_be_visible()
    await expect(page.locator("#best")).to_contain_text("0.5 at step 30 by run 0")
    train(api, runs[1]["run_id"], 0.75)
    advance(api)
    await expect(page.locator("#best")).to_contain_text("0.75 at step 30 by run 1")
    await expect(page.locator("#top .head")).to_contain_text("Succeeded")
