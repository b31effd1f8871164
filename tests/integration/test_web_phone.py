"""The dashboard in a real browser: on a phone, without any run, and with a very long history."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Page, expect
from sqlalchemy import insert

from everstep.wire.events import EventKind
from service.db.tables import events
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_dir import RunDir
from tests.browser.chromium import chromium_path
from tests.browser.story import Story
from tests.integration.web_pages import context, page, story
from tests.support.api_service import NOON, ApiService

__all__ = ["context", "page", "story"]

PHONE_PX = 390
LONG = "resnet-50-with-a-name-that-nobody-broke-" * 3

expect.set_options(timeout=60_000)

pytestmark = pytest.mark.skipif(
    chromium_path() is None, reason="needs Chromium: apt-get install chromium"
)


async def width(page: Page) -> int:
    """How wide the page is to be scrolled."""
    found: int = await page.evaluate("document.scrollingElement.scrollWidth")
    return found


async def test_nothing_scrolls_sideways_on_a_phone(
    api: ApiService, story: Story, page: Page
) -> None:
    wide = await api.create(name=LONG[:120], tags={"team": LONG[:120]}, project="vision")
    with RankLogWriter(RunDir(api.storage, story.running), 1, 1, 0) as writer:
        writer.write([LogRecord(NOON, "WARNING", LONG * 3)])
    run = f"/runs/{story.running}"
    paths = [
        "/runs",
        "/runs?search=nothing",
        "/runs?columns=owner,notes,spec.optimizer.lr,metrics.val_accuracy,best&sort=-best",
        *(f"{run}{tail}" for tail in ("", "/checkpoints", "/logs", "/events", "/spec")),
        f"/runs/{story.failed}",
        f"/runs/{wide}",
        "/compare",
        f"/compare?run={story.finished}&run={story.running}&run={wide}",
        "/new",
        "/cluster",
        "/queue",
        "/login",
        "/no/such/page",
    ]
    await page.set_viewport_size({"width": PHONE_PX, "height": 844})
    found: dict[str, int] = {}
    for path in paths:
        await page.goto(path)
        if await page.locator("#charts").count():
            await expect(page.locator("figure.chart, #charts .state").first).to_be_visible()
        found[path] = await width(page)
        dialogs = page.locator("details.confirm > summary")
        for index in range(await dialogs.count()):
            await dialogs.nth(index).evaluate("each => { each.parentElement.open = true; }")
            form = page.locator("details.confirm[open] > :not(summary)").first
            box = await form.bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= PHONE_PX
            found[f"{path} dialog {index}"] = await width(page)
            await dialogs.nth(index).evaluate("each => { each.parentElement.open = false; }")
    assert {path: px for path, px in found.items() if px > PHONE_PX} == {}


async def test_a_phone_shows_progress_metrics_and_the_account(story: Story, page: Page) -> None:
    await page.set_viewport_size({"width": PHONE_PX, "height": 844})
    await page.goto("/runs")
    for place in (".runs .progress", ".runs .latest", "a.who"):
        box = await page.locator(place).first.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= PHONE_PX, place
    links = await page.locator("nav[aria-label=Main] a").all()
    assert len({(box := await link.bounding_box()) and box["y"] for link in links}) == 1, "one row"


async def test_a_log_line_has_a_line_of_its_own_on_a_phone(story: Story, page: Page) -> None:
    await page.set_viewport_size({"width": PHONE_PX, "height": 844})
    await page.goto(f"/runs/{story.running}/logs")
    row = page.locator(".log tbody tr").first
    time, message = (
        await row.locator("td").first.bounding_box(),
        await row.locator(".message").bounding_box(),
    )
    assert time is not None and message is not None
    assert message["y"] >= time["y"] + time["height"] - 1 and message["width"] > PHONE_PX * 0.8


async def test_pages_without_any_run_have_no_script_error(page: Page) -> None:
    """What the browser's console says is a failure of its own."""
    for path in ("/runs", "/new", "/compare", "/queue", "/cluster", "/no/such/page"):
        await page.goto(path)
        await expect(page.locator("h1")).to_be_visible()


@pytest.mark.alone
async def test_a_long_history_opens_within_a_second_and_is_live(
    api: ApiService, page: Page
) -> None:
    run_id, journal = await api.running()
    first = api.events.page_before(run_id, None, 1).rows[0].seq + 1
    rows = [
        {
            "run_id": run_id,
            "seq": first + number,
            "at": NOON + number,
            "kind": "metrics" if number % 10 else "evaluated",
            "submission": 1,
            "attempt": 1,
            "data": {"step": number, "epoch": 0, "metrics": {"accuracy": 0.5}, "points": []},
        }
        for number in range(200_000)
    ]
    with api.database.write() as connection:
        connection.execute(insert(events), rows)
        connection.exec_driver_sql(f"UPDATE runs SET last_seq = {first + len(rows)}")
    took_ms = []
    for _ in range(3):
        await page.goto(f"/runs/{run_id}/events")
        took_ms.append(
            await page.evaluate("performance.getEntriesByType('navigation')[0].duration")
        )
    assert min(took_ms) < 1000, took_ms
    assert await page.evaluate("document.scrollingElement.scrollHeight") < 12_000
    newest = page.locator("#events tbody tr").first
    await expect(newest).to_contain_text("step 199990")
    api.apply(
        run_id,
        [journal.event(EventKind.EVALUATED, step=200_001, epoch=1, metrics={"accuracy": 0.75})],
    )
    await expect(newest).to_contain_text("step 200001")  # nobody reloads the page
    await page.get_by_role("link", name="Older events").click()
    await expect(page).to_have_url(re.compile(r"before=\d+"))
    await expect(page.locator("#events tbody tr")).to_have_count(100)
