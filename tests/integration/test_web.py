"""The dashboard in a real browser: pages are live, usable by keyboard, and hold to their own
policy.

The service is real (uvicorn, SQLite, storage), its history told by tests/browser/story.py; no
cluster is needed.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from playwright.async_api import BrowserContext, Page, expect
from sqlalchemy import insert

from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from service.db.run_lookup import RunFilter
from service.db.tables import metrics
from tests.browser.chromium import chromium_path
from tests.browser.story import Story
from tests.integration.web_pages import context, page, story
from tests.support.api_service import NOON, ApiService, Journal
from tests.support.web_browser import status_of

__all__ = ["context", "page", "story"]

AXE = Path(__file__).parents[1] / "browser" / "axe-core" / "axe.min.js"

expect.set_options(timeout=60_000)

pytestmark = pytest.mark.skipif(
    chromium_path() is None, reason="needs Chromium: apt-get install chromium"
)


def paths(story: Story) -> list[str]:
    run = f"/runs/{story.running}"
    own = [
        run,
        f"{run}/checkpoints",
        f"{run}/logs",
        f"{run}/events",
        f"{run}/spec?against={story.finished}",
        f"/new?from={story.running}",
    ]
    compare = f"/compare?run={story.finished}&run={story.running}"
    return [
        "/runs",
        *own,
        f"/runs/{story.failed}",
        compare,
        "/cluster",
        "/queue",
        "/runs?search=nothing",
        "/runs/none",
        "/login",
    ]


@pytest.mark.core
async def test_logging_in_and_searching_by_keyboard(
    api: ApiService, story: Story, context: BrowserContext
) -> None:
    await context.clear_cookies()
    page = await context.new_page()
    await page.goto("/runs")
    await expect(page.get_by_label("Token")).to_be_focused()
    await page.keyboard.type(api.token("admin"))
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("link", name="resnet-width-16-cosine")).to_be_visible()
    await page.keyboard.press("/")
    await page.keyboard.type("WIDTH-32")
    await expect(page.get_by_role("link", name="resnet-width-16-cosine")).to_have_count(0)
    await expect(page).to_have_url(f"{api.url}/runs?search=WIDTH-32")


@pytest.mark.core
async def test_a_run_that_trains_is_followed_and_cancelled(
    api: ApiService, story: Story, page: Page
) -> None:
    await page.goto(f"/runs/{story.running}")
    loss = page.locator("figure.chart", has_text="loss").first
    await expect(loss.get_by_role("img")).to_have_attribute("aria-label", _has("at step 560"))
    run = api.runs.get(story.running)
    assert run is not None
    last = api.events.after(story.running, run.last_seq - 1, 1)[0]
    journal = _journal_behind(api, story.running, last.attempt)
    api.apply(story.running, [journal.steps(561, 562, loss=0.0625)])
    await expect(loss.get_by_role("img")).to_have_attribute(
        "aria-label", _has("0.0625 at step 562")
    )
    await expect(page.locator("#figures")).to_contain_text("562")
    await expect(page.locator(".timeline li")).to_have_count(2)
    failure = {
        "verdict": "worker_lost",
        "first_rank": 0,
        "node_id": "3b321ac3",
        "step": 562,
        "action": "restarted",
    }
    api.apply(story.running, [journal.event(EventKind.FAILURE, **failure)])
    await expect(page.locator(".timeline li")).to_have_count(3)
    await expect(page.locator("#top .badge")).to_have_text("Recovering")
    await page.get_by_text("Cancel…").click()
    await page.get_by_role("button", name="Cancel this run").click()
    await expect(page.locator("#top .badge")).to_have_text("Stopping")
    assert status_of(api, story.running) == RunStatus.STOPPING


async def test_columns_and_order_survive_a_reload_and_updates(
    api: ApiService, story: Story, page: Page
) -> None:
    await page.goto("/runs?project=vision")
    await page.get_by_text("Columns…").click()
    for title in ("Progress", "Latest", "Ranks", "Restarts"):
        await page.get_by_label(title, exact=True).uncheck()
    await page.get_by_label("Add a metric").fill("metrics.val_accuracy")
    await page.get_by_role("button", name="Show these columns").click()
    await page.get_by_role("link", name="val_accuracy").click()
    await expect(page).to_have_url(
        re.compile(r"project=vision&sort=-metrics.val_accuracy&columns=")
    )
    names = page.locator("td a.name")
    for _ in range(2):
        assert await names.all_inner_texts() == [
            "resnet-width-16",
            "resnet-width-16-cosine",
            "resnet-width-32",
        ]
        assert await page.locator("th[aria-sort=descending]").inner_text() == "val_accuracy ↓"
        await page.reload()
    await page.locator("td.tick input").nth(0).check()
    await page.locator("td.tick input").nth(2).check()
    await names.nth(2).focus()
    await api.create(name="newest", project="vision")
    await expect(names).to_have_count(4)
    await expect(names.nth(2)).to_be_focused()
    assert await names.nth(3).inner_text() == "newest", "it has no value yet"
    await page.get_by_role("button", name="Compare selected").click()
    way = page.locator("svg.parallel g.way")
    await expect(way).to_have_count(2)
    await expect(page.get_by_role("img", name=re.compile("train.seed 3"))).to_be_visible()
    await page.goto(f"/runs/{story.running}")
    await page.get_by_text("Add notes").click()
    await page.get_by_label("Notes").fill("the one to beat")
    await page.get_by_role("button", name="Save the notes").click()
    await expect(page.locator("#notes")).to_have_text("the one to beat")


async def test_the_view_of_curves_is_in_the_url_and_they_are_saved(
    story: Story, page: Page
) -> None:
    await page.goto(f"/runs/{story.running}")
    figure = page.locator("figure.chart", has_text="loss").first
    await expect(figure).to_be_visible()
    await page.get_by_label("Smoothing").fill("0.6")
    await page.get_by_label("Logarithmic").check()
    await expect(figure.locator(".u-legend")).to_contain_text("loss raw")
    box = await figure.locator(".u-over").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    await page.mouse.move(box["x"] + box["width"] * 0.25, middle)
    await page.mouse.down()
    await page.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=4)
    await page.mouse.up()
    view = re.compile(r"\?smooth=0.6&scale=log&zoom=(1[34]\d[.\d]*),(2[78]\d[.\d]*)$")
    await expect(page).to_have_url(view)
    await page.reload()
    await expect(page.get_by_role("button", name="Reset zoom")).to_be_visible()
    await expect(page.get_by_label("Smoothing")).to_have_value("0.6")
    async with page.expect_download() as coming:
        await page.get_by_role("button", name="PNG: save loss as a picture").click()
    picture = await coming.value
    assert picture.suggested_filename == "resnet-width-16-cosine-loss.png"
    assert (await picture.path()).stat().st_size > 5000
    async with page.expect_download() as coming:
        await page.get_by_role("link", name="CSV: save every value of loss").click()
    table = (await (await coming.value).path()).read_text().splitlines()
    assert len(table) == 1 + 560 + 560 // 50, "steps and evaluations"
    await page.get_by_role("button", name="Reset zoom").click()
    await expect(page).to_have_url(re.compile(r"\?smooth=0.6&scale=log$"))
    await page.get_by_role("radio", name="Time").check()
    await expect(page).to_have_url(re.compile("axis=time"))
    hosts = page.locator("#system-charts figure.chart")
    memory = hosts.filter(has_text="Memory").first.get_by_role("img")
    await expect(memory).to_have_attribute("aria-label", _has("rank 2: 2.65 GB, between"))
    await expect(hosts.filter(has_text="GPU temperature")).to_contain_text("64 °C")


async def test_new_points_are_drawn_without_reading_the_curves_again(
    api: ApiService, page: Page
) -> None:
    """Also where some charts of metrics are hidden, and those of hosts are shown."""
    run_id, journal = await api.running()
    values = {f"m{number}": 1.0 for number in range(8)}
    use = {"cpu_cores": 1.5, "rss_bytes": 2, "net_in_bytes_per_s": 3, "net_out_bytes_per_s": 4}
    steps = journal.steps(2, loss=1.0, **values)
    host = journal.event(EventKind.RANK_USE, rank=0, node_id="node-1", seconds=60.0, **use)
    api.apply(run_id, [steps, host])
    reads: list[str] = []
    page.on("request", lambda request: reads.append(request.url))
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator("#system-charts figure.chart")).to_have_count(4)
    chart = page.locator("figure.chart", has_text="loss").first.get_by_role("img")
    for step in (3, 4, 5):
        api.apply(run_id, [journal.steps(step, loss=1.0, **values)])
        await expect(chart).to_have_attribute("aria-label", _has(f"at step {step},"))
    await page.wait_for_timeout(1000)
    assert len([url for url in reads if "/curves.json" in url]) == 1


async def test_a_run_is_written_in_the_editor_and_submitted(
    api: ApiService, story: Story, page: Page
) -> None:
    await page.goto(f"/runs/{story.finished}")
    await page.get_by_role("link", name="Run again").click()
    text = page.get_by_label("Spec (YAML or JSON)")
    await expect(text).to_have_value(re.compile("^name: resnet-width-16\n"))
    await page.get_by_label("Epochs").fill("0")
    await page.get_by_label("Epochs").press("Enter")
    await expect(text).to_have_value(re.compile("epochs: 0\n"))
    await expect(page.locator("#faults li")).to_contain_text("train.epochs")
    await page.locator("#faults button").click()
    await page.keyboard.type("  epochs: 3")
    await expect(page.locator("#summary")).to_have_text("The service would accept this spec.")
    await expect(page.get_by_label("Epochs")).to_have_value("3")
    await expect(page.locator("#gutter .wrong")).to_have_count(0)
    await expect(page.locator("#completion-place")).to_have_text("in train")
    await page.locator("#completion-list").get_by_role("button", name="seed", exact=True).click()
    await expect(text).to_have_value(re.compile("  epochs: 3\n  seed: 0\n"))
    await page.get_by_role("button", name="Submit the run").click()
    await expect(page.locator("h1")).to_have_text("resnet-width-16")
    [newest] = api.runs.find(RunFilter(), 1)
    assert newest.spec["train"]["epochs"] == 3 and newest.owner == "admin of None"


async def test_times_are_in_the_reader_s_zone_and_in_utc_on_hover(
    api: ApiService, story: Story, context: BrowserContext
) -> None:
    assert context.browser is not None
    tokyo = await context.browser.new_context(timezone_id="Asia/Tokyo")
    await tokyo.add_cookies(await context.cookies())  # type: ignore[arg-type]
    page = await tokyo.new_page()
    await page.goto(f"{api.url}/runs/{story.running}/events")
    time = page.locator("#events time").first
    at = datetime.fromisoformat(await time.get_attribute("datetime") or "")
    assert await time.inner_text() == f"{at.astimezone(ZoneInfo('Asia/Tokyo')):%Y-%m-%d %H:%M:%S}"
    assert await time.get_attribute("title") == f"{at:%Y-%m-%d %H:%M:%S} UTC"
    run = api.runs.get(story.running)
    assert run is not None
    journal = _journal_behind(api, story.running, run.attempt)
    evaluated = journal.event(EventKind.EVALUATED, step=561, epoch=11, metrics={"accuracy": 0.5})
    api.apply(story.running, [evaluated])
    await expect(page.locator("#events tbody tr").first).to_contain_text("step 561")
    await expect(time).to_have_text(re.compile(r"^[\d-]+ [\d:]+$"))  # also after an update


async def test_a_service_that_is_away_is_told_and_its_return_too(
    story: Story, context: BrowserContext, page: Page
) -> None:
    await page.goto("/runs")
    await context.set_offline(True)
    await expect(page.locator("#connection")).to_contain_text("does not respond")
    await context.set_offline(False)
    await expect(page.locator("#connection")).to_be_hidden()


@pytest.mark.alone
async def test_a_hundred_thousand_points_are_thinned_and_drawn(
    api: ApiService, story: Story, page: Page
) -> None:
    points = [
        {
            "run_id": story.running,
            "name": "loss",
            "step": step,
            "at": NOON + step,
            "value": 9.0 if step == 50_000 else 0.5,
        }
        for step in range(1000, 101_000)
    ]
    with api.database.write() as connection:
        connection.execute(insert(metrics), points)
    await page.goto(f"/runs/{story.running}")
    chart = page.locator("figure.chart", has_text="loss").first.get_by_role("img")
    await expect(chart).to_have_attribute("aria-label", _has("at step 100999"), timeout=60_000)
    await expect(chart).to_have_attribute("aria-label", _has("and 9;"))
    drawn_ms = await page.evaluate(
        """() => { const began = performance.now();
        document.querySelector("input[name=axis][value=time]").click();
        return performance.now() - began; }"""
    )
    assert drawn_ms < 500


async def test_nothing_serious_is_found_by_axe(story: Story, page: Page) -> None:
    found: dict[str, list[str]] = {}
    for scheme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        for path in paths(story):
            await page.goto(path)
            if await page.locator("#charts").count():
                await expect(page.locator("figure.chart").first).to_be_visible(timeout=60_000)
            await page.evaluate(AXE.read_text())
            result = await page.evaluate(
                "(rules) => axe.run({resultTypes: ['violations'], ...rules})", rules
            )
            bad = [
                each for each in result["violations"] if each["impact"] in ("serious", "critical")
            ]
            if bad:
                found[f"{scheme} {path}"] = [
                    f"{each['id']}: {node['html'][:200]}"
                    for each in bad
                    for node in each["nodes"][:3]
                ]
    assert found == {}


async def test_the_reference_is_drawn_from_our_own_files(api: ApiService, page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.goto("/docs")
    await expect(page.get_by_role("heading", name="Everstep")).to_be_visible()
    await expect(page.get_by_text("Submit a run", exact=True)).to_be_visible()
    assert [url for url in asked if not url.startswith((api.url, "data:"))] == []


def _has(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text))


def _journal_behind(api: ApiService, run_id: str, attempt: int) -> Journal:
    """The run's journal, to be continued."""
    run = api.runs.get(run_id)
    assert run is not None
    journal = Journal(submission=run.submission, attempt=attempt, at=api.clock.now)
    journal.n = run.journal_n
    return journal
