"""Pages of the dashboard around a run's own: lists, cluster, reference and trouble.

And nothing that users wrote is markup."""

from __future__ import annotations

import re
from html import unescape
from urllib.parse import quote

import pytest
from sqlalchemy import insert

from everstep.spec.parsing import parse_spec
from everstep.wire import Reason, ReasonCode, RunStatus
from everstep.wire.events import EventKind
from service.db.ids import new_id
from service.db.runs import new_row
from service.db.tables import runs as runs_table
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_dir import RunDir
from tests.support.api_service import NOON, ApiService, spec
from tests.support.page_text import HOSTILE, fail, text_of
from tests.support.web_browser import Browser


@pytest.fixture
async def browser(api: ApiService) -> Browser:
    return await Browser.logged_in(api, api.token("admin"))


# ---------------------------------------------------------------- runs


async def test_empty_pages_say_what_to_do(browser: Browser) -> None:
    assert "No runs yet" in await browser.page("/runs")
    assert "No matching runs" in await browser.page("/runs?search=nothing")
    assert "The queue is empty" in await browser.page("/queue")
    assert "Choose runs" in await browser.page("/compare")
    assert (await browser.http.get("/")).headers["location"] == "/runs"
    assert "does not exist" in await browser.page("/runs/run_000000000000", 404)
    assert 'aria-label="Main"' in await browser.page("/no/such/page", 404), "with navigation"


async def test_runs_are_searched_filtered_and_paged(api: ApiService, browser: Browser) -> None:
    wanted = await api.create(name="Vision 100", tags={"team": "red_pandas"}, project="vision")
    failed = await api.create(name="speech")
    api.runs.transition(
        failed,
        RunStatus.QUEUED,
        RunStatus.FAILED,
        Reason(code=ReasonCode.INFEASIBLE, message="too large"),
    )
    for query in (
        "search=vision",
        "search=d_pand",
        f"search={wanted[6:]}",
        "project=vision",
        "tag=team%3Dred_pandas",
        "tag=team",
    ):
        html = await browser.page(f"/runs?{query}")
        assert wanted in html and failed not in html, query
    assert (
        failed in (html := await browser.page("/runs?status=failed"))
        and wanted not in html
        and "too large" in html
    )
    assert wanted in (html := await browser.page("/runs?status=active")) and failed not in html
    for nothing in ("search=%25", "search=d%5Fx", "search=_00"):  # no wildcards
        assert "No matching runs" in await browser.page(f"/runs?{nothing}")
    listed = await api.get("/v1/runs?search=PANDA")
    assert [item["id"] for item in listed["items"]] == [wanted]
    for index in range(50):
        api.clock.now += 1
        await api.create(name=f"more {index}")
    first = await browser.page("/runs")
    [older] = re.findall(r'href="([^"]*)" rel="next"', first)
    assert wanted not in first and wanted in await browser.page(unescape(older))


async def test_the_list_is_small_with_6000_runs(api: ApiService, browser: Browser) -> None:
    wanted = parse_spec(spec())
    rows = [
        new_row(new_id("run", NOON + index), wanted, "tok_x", NOON + index).columns()
        for index in range(6000)
    ]
    with api.database.write() as connection:
        connection.execute(insert(runs_table), rows)
    answer = await browser.http.get("/runs?search=digits")
    assert "6,000" in answer.text
    total = int(answer.headers["content-length"])
    for address in set(re.findall(r'(?:href|src)="(/static/[^"]*)"', answer.text)):
        asset = await browser.http.get(address)
        assert (
            asset.headers["content-encoding"] == "gzip"
            and "immutable" in asset.headers["cache-control"]
        )
        total += int(asset.headers["content-length"])
    assert total < 60_000


# ---------------------------------------------------------------- cluster and queue


async def test_nodes_are_shown_and_marked(api: ApiService, browser: Browser) -> None:
    api.cluster.nodes = (
        api.cluster.node("node-1"),
        api.cluster.node("node-2"),
        api.cluster.node("node-3", "DEAD"),
    )
    run_id, _ = await api.running()
    text = text_of(await browser.page("/cluster"))
    assert "Live nodes 2" in text and "digits rank 0" in text and "digits rank 1" in text
    assert (
        await browser.send("/cluster", "/cluster/nodes/node-2/cordon", reason="bad disk")
    ).status_code == 303
    text = text_of(await browser.page("/cluster"))
    assert "Cordoned" in text and "bad disk" in text
    assert (
        await browser.send("/cluster", "/cluster/nodes/node-2/drain", deadline_min="-1")
    ).status_code == 422
    assert (
        await browser.send("/cluster", "/cluster/nodes/node-2/drain", deadline_min="10")
    ).status_code == 303
    assert "Draining" in await browser.page("/cluster")
    assert (await browser.send("/cluster", "/cluster/nodes/node-2/uncordon")).status_code == 303
    assert "bad disk" not in await browser.page("/cluster")
    viewer = await Browser.logged_in(api, api.token("viewer"))
    assert "/drain" not in await viewer.page("/cluster") and run_id in await viewer.page("/cluster")
    api.cluster.available = False
    assert "Ray does not respond" in await browser.page("/cluster")


async def test_the_queue_is_in_the_order_of_starts(api: ApiService, browser: Browser) -> None:
    ids = []
    for priority in (0, 5, 5):
        ids.append(
            await api.create(priority=priority, scaling={"min_workers": 2, "max_workers": 4})
        )
        api.clock.now += 1
    api.runs.set_reason(
        ids[0],
        RunStatus.QUEUED,
        Reason(code=ReasonCode.WAITING_FOR_CAPACITY, message="needs 2 x CPU"),
    )
    html = await browser.page("/queue")
    assert sorted(ids, key=html.index) == [ids[1], ids[2], ids[0]]
    assert "needs 2 x CPU" in html and "2 to 4 ranks of 1 CPU" in text_of(html)


# ---------------------------------------------------------------- what users wrote is text


async def test_nothing_that_users_wrote_is_markup(api: ApiService, browser: Browser) -> None:
    run_id, journal = await api.running(tags={HOSTILE[:60]: HOSTILE}, env={"X": HOSTILE})
    api.apply(
        run_id,
        [
            journal.event(
                EventKind.METRICS, points=[{"step": 2, "at": NOON, "values": {HOSTILE: 1.0}}]
            ),
            fail(
                journal,
                exception=HOSTILE,
                evidence={HOSTILE: [HOSTILE]},
                action=HOSTILE,
                node_id=HOSTILE,
            ),
            journal.event(EventKind.WAITING, code="waiting_for_capacity", message=HOSTILE),
        ],
    )
    with RankLogWriter(RunDir(api.storage, run_id), 1, 1, 0) as writer:
        writer.write([LogRecord(NOON, f"x {HOSTILE}", HOSTILE)])
    other = await api.create(tags={"t": HOSTILE})
    api.runs.set_reason(
        other, RunStatus.QUEUED, Reason(code=ReasonCode.INFEASIBLE, message=HOSTILE)
    )
    paths = [
        f"/runs/{run_id}{tail}"
        for tail in ("", "/logs", "/events", f"/spec?against={other}", "/checkpoints")
    ]
    for path in (
        *paths,
        f"/new?from={run_id}",
        "/runs",
        "/queue",
        f"/compare?run={run_id}&run={other}",
        "/cluster",
    ):
        html = await browser.page(path)
        assert "<script>alert" not in html and (path == "/cluster" or "{{7*7}}" in html), path
    await browser.page(
        f"/runs?search={quote(HOSTILE)}&tag={quote(HOSTILE)}&project={quote(HOSTILE[:60])}"
    )
    answer = await browser.http.get(f"/runs/{run_id}/curves.json")
    assert (
        answer.headers["content-type"] == "application/json"
        and answer.headers["x-content-type-options"] == "nosniff"
    )


# ---------------------------------------------------------------- trouble, reference, links


async def test_a_database_that_is_away_is_a_page_too(
    api: ApiService, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service.db.engine import DatabaseUnavailable

    def away(*_: object) -> None:
        raise DatabaseUnavailable("gone")

    monkeypatch.setattr(api.runs, "page", away)
    answer = await browser.http.get("/runs")
    assert (
        answer.status_code == 503
        and "Try again" in answer.text
        and answer.headers["retry-after"] == "2"
    )


async def test_the_reference_needs_nothing_from_elsewhere(api: ApiService) -> None:
    http = await api.client(None)
    answer = await http.get("/docs")
    assert (
        answer.status_code == 200
        and "default-src 'none'" in answer.headers["content-security-policy"]
    )
    assert not re.findall(r"https?://", answer.text)
    for address in re.findall(r'(?:href|src)="(/static/[^"]*)"', answer.text):
        assert (await http.get(address)).status_code == 200
    assert (await http.get("/static/../app.py")).status_code == 404
    assert (await http.get("/static/%2e%2e/rendering.py")).status_code == 404
