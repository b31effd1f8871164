"""The pages of sweeps as a browser gets them."""

from __future__ import annotations

import re

import httpx

from tests.support.api_service import ApiService
from tests.support.page_text import text_of
from tests.support.sweep_runs import advance, create_sweep, train
from tests.support.web_browser import Browser


async def act(browser: Browser, sweep_id: str, action: str, **fields: str) -> httpx.Response:
    """Press the button of an action on the sweep's page."""
    html = await browser.page(f"/sweeps/{sweep_id}")
    [csrf] = re.findall(rf'/{action}"><input type="hidden" name="csrf" value="([^"]*)"', html)
    data = {"csrf": csrf, **fields}
    return await browser.http.post(f"/sweeps/{sweep_id}/{action}", data=data)


async def test_the_page_ranks_runs_and_names_the_best(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer"))
    assert "No sweeps yet" in await browser.page("/sweeps")
    grid = {"optimizer.lr": [0.1, 0.2, 0.3], "optimizer.name": ["adamw"]}
    made = await create_sweep(api, grid=grid, name="rates")
    page = text_of(await browser.page(f"/sweeps/{made['id']}"))
    assert "not submitted" in page and "Curves" not in page and "Waiting 3" in page
    update = await browser.http.get(f"/sweeps/{made['id']}?has_curves=false")
    assert "HX-Refresh" not in update.headers and "Waiting" in update.text
    advance(api)
    ids = [run["run_id"] for run in (await api.get(f"/v1/sweeps/{made['id']}/runs"))["items"]]
    train(api, ids[0], 0.5)
    train(api, ids[1], 0.75)
    train(api, ids[2], 0.25, "failed")
    advance(api)
    html = await browser.page(f"/sweeps/{made['id']}")
    page = text_of(html)
    assert "Best val_accuracy 0.75 at step 30 by run 1 : optimizer.lr 0.2" in page
    assert "1 of 3 runs failed" in page and "runs_failed" in page
    assert re.findall(r"<code>(run_\w+)</code>", html) == [ids[1], ids[0], ids[2]]
    ways = re.findall(r"<title>(run \d): ([^<]*)</title>", html)
    assert ways[-1] == ("run 1", "optimizer.lr 0.2, optimizer.name adamw, val_accuracy 0.75")
    assert [name for name, _ in ways] == ["run 2", "run 0", "run 1"], "the best on top"
    for run_id in ids:
        assert f"/runs/{run_id}/curves.json" in html
    update = await browser.http.get(f"/sweeps/{made['id']}?has_curves=false")
    assert update.headers["HX-Refresh"] == "true", "the page has no curves yet, and is loaded anew"
    listed = text_of(await browser.page("/sweeps"))
    assert "rates" in listed and "3 / 3" in listed and "0.75" in listed
    assert f'href="/sweeps/{made["id"]}"' in await browser.page(f"/runs/{ids[0]}")


async def test_a_sweep_is_cancelled_and_deleted_on_its_page(api: ApiService) -> None:
    made = await create_sweep(api)
    advance(api)
    viewer = await Browser.logged_in(api, api.token("viewer"))
    assert "Cancel" not in text_of(await viewer.page(f"/sweeps/{made['id']}"))
    browser = await Browser.logged_in(api, api.token("submitter", "default"))
    answer = await act(browser, made["id"], "cancel")
    assert (answer.status_code, answer.headers["location"]) == (303, f"/sweeps/{made['id']}")
    assert "Stopping" in text_of(await browser.page(f"/sweeps/{made['id']}"))
    advance(api)
    advance(api)
    answer = await act(browser, made["id"], "delete", runs="1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/sweeps")
    assert (await api.get("/v1/runs"))["items"] == [] == (await api.get("/v1/sweeps"))["items"]


async def test_another_project_and_a_form_from_elsewhere_get_nothing(api: ApiService) -> None:
    made = await create_sweep(api)
    stranger = await Browser.logged_in(api, api.token("submitter", "elsewhere"))
    assert (await stranger.http.get(f"/sweeps/{made['id']}")).status_code == 404
    assert made["id"] not in await stranger.page("/sweeps")
    browser = await Browser.logged_in(api, api.token("submitter", "default"))
    answer = await browser.http.post(f"/sweeps/{made['id']}/cancel", data={"csrf": "x"})
    assert answer.status_code == 403
    assert (await api.get(f"/v1/sweeps/{made['id']}"))["status"] == "RUNNING"
