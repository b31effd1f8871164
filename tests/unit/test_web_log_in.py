"""Logging in to the dashboard, and what forms from elsewhere cannot do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep.wire import RunStatus
from service.web.session import COOKIE, csrf_token, local_path
from tests.unit.api_service import NOON, ApiService
from tests.unit.web_browser import Browser, status_of


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path) as service:
        yield service


async def test_a_page_leads_to_the_log_in_and_the_log_in_back(api: ApiService) -> None:
    http = await api.client(None)
    sent = await http.get("/runs?status=failed", headers={"Accept": "text/html"})
    assert (sent.status_code, sent.headers["location"]) == (303, "/login?next=%2Fruns%3Fstatus%3Dfailed")
    assert 'value="/runs?status=failed"' in (await http.get(sent.headers["location"])).text
    wrong = await http.post("/login", data={"token": "evs_wrong", "next": "/runs?status=failed"})
    assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
    assert "not valid" in wrong.text and "evs_wrong" not in wrong.text and 'value="/runs?status=failed"' in wrong.text
    right = await http.post("/login", data={"token": api.token("viewer"), "next": "/runs?status=failed"})
    assert (right.status_code, right.headers["location"]) == (303, "/runs?status=failed")
    cookie = right.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie and "secure" not in cookie
    assert (await http.get("/runs")).status_code == 200


async def test_scripts_are_told_where_to_log_in_instead_of_getting_its_page(api: ApiService) -> None:
    http = await api.client(None)
    for headers in ({"Accept": "application/json"}, {"Accept": "text/html", "HX-Request": "true"}):
        answer = await http.get("/runs", headers=headers)
        assert (answer.status_code, answer.headers["hx-redirect"], answer.content) == (401, "/login", b"")


@pytest.mark.parametrize("target", ["https://evil.example", "//evil.example", "/\\evil.example", "runs", "", None, "/\tx"])
def test_a_log_in_leads_nowhere_else(target: str | None) -> None:
    assert local_path(target) == "/runs"


async def test_a_token_that_ends_ends_its_log_ins(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer", expires_at=NOON + 60))
    await browser.page("/runs")
    api.clock.now += 61
    assert (await browser.http.get("/runs")).headers["location"] == "/login?next=%2Fruns"


async def test_logging_out_takes_the_cookie_away(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer"))
    answer = await browser.send("/runs", "/logout")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert (await browser.http.get("/runs")).status_code == 303


async def test_a_form_needs_its_secret_and_its_origin(api: ApiService) -> None:
    run_id, _ = await api.running()
    mine, other = api.token("submitter"), api.token("submitter")
    browser = await Browser.logged_in(api, mine)
    path = f"/runs/{run_id}/cancel"
    for fields in ({}, {"csrf": ""}, {"csrf": "no.mac"}, {"csrf": csrf_token(other)}, {"csrf": "é.é"}):
        assert (await browser.http.post(path, data=fields)).status_code == 403
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert (await browser.http.post(path, data={"csrf": csrf_token(mine)}, headers=headers)).status_code == 403
    assert status_of(api, run_id) == RunStatus.RUNNING
    same = {"Origin": api.url, "Sec-Fetch-Site": "same-origin"}
    answer = await browser.http.post(path, data={"csrf": csrf_token(mine)}, headers=same)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run_id}")
    assert status_of(api, run_id) == RunStatus.STOPPING


async def test_a_log_in_form_from_another_site_is_refused(api: ApiService) -> None:
    http = await api.client(None)
    answer = await http.post("/login", data={"token": api.token("viewer")}, headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403 and "set-cookie" not in answer.headers


async def test_the_cookie_is_no_token_of_the_api_and_the_token_no_cookie(api: ApiService) -> None:
    run_id, _ = await api.running()
    browser = await Browser.logged_in(api, api.token("admin"))
    assert browser.http.cookies[COOKIE]
    assert (await browser.http.post(f"/v1/runs/{run_id}/cancel")).status_code == 401
    assert (await api.http.get("/runs", headers={"Accept": "text/html"})).status_code == 303


async def test_roles_and_projects_hold_on_pages(api: ApiService) -> None:
    run_id, _ = await api.running(project="vision")
    viewer = await Browser.logged_in(api, token := api.token("viewer", "vision"))
    html = await viewer.page(f"/runs/{run_id}")
    assert "/cancel" not in html and "/fork" not in html
    for path in (f"/runs/{run_id}/cancel", f"/runs/{run_id}/delete", f"/runs/{run_id}/fork"):
        assert (await viewer.http.post(path, data={"csrf": csrf_token(token)})).status_code == 403
    assert (await viewer.http.post("/cluster/nodes/node-1/cordon", data={"csrf": csrf_token(token)})).status_code == 403
    stranger = await Browser.logged_in(api, api.token("submitter", "speech"))
    for tail in ("", "/logs", "/checkpoints", "/events", "/spec", "/fork", "/curves.json", "/stream"):
        assert (await stranger.http.get(f"/runs/{run_id}{tail}")).status_code == 404
    assert run_id not in await stranger.page("/runs")
    await stranger.page(f"/compare?run={run_id}", 404)
