"""Logging in to the dashboard, and what forms from elsewhere cannot do."""

from __future__ import annotations

import hashlib

import pytest
from sqlalchemy import func, select

from everstep.wire import RunStatus
from service.db.tables import sessions
from service.db.tokens import LASTS_S
from service.web.session import COOKIE, csrf_token, local_path
from tests.support.api_service import NOON, ApiService
from tests.support.web_browser import Browser, status_of


async def test_a_page_leads_to_the_log_in_and_the_log_in_back(api: ApiService) -> None:
    http = await api.client(None)
    sent = await http.get("/runs?status=failed", headers={"Accept": "text/html"})
    assert (sent.status_code, sent.headers["location"]) == (
        303,
        "/login?next=%2Fruns%3Fstatus%3Dfailed",
    )
    assert 'value="/runs?status=failed"' in (await http.get(sent.headers["location"])).text
    wrong = await http.post("/login", data={"token": "evs_wrong", "next": "/runs?status=failed"})
    assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
    assert (
        "not valid" in wrong.text
        and "evs_wrong" not in wrong.text
        and 'value="/runs?status=failed"' in wrong.text
    )
    right = await http.post(
        "/login", data={"token": api.token("viewer"), "next": "/runs?status=failed"}
    )
    assert (right.status_code, right.headers["location"]) == (303, "/runs?status=failed")
    cookie = right.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie and "secure" not in cookie
    assert (await http.get("/runs")).status_code == 200


async def test_scripts_are_told_where_to_log_in_instead_of_getting_its_page(
    api: ApiService,
) -> None:
    http = await api.client(None)
    for headers in ({"Accept": "application/json"}, {"Accept": "text/html", "HX-Request": "true"}):
        answer = await http.get("/runs", headers=headers)
        assert (answer.status_code, answer.headers["hx-redirect"], answer.content) == (
            401,
            "/login",
            b"",
        )


@pytest.mark.parametrize(
    "target",
    ["https://evil.example", "//evil.example", "/\\evil.example", "runs", "", None, "/\tx"],
)
def test_a_log_in_leads_nowhere_else(target: str | None) -> None:
    assert local_path(target) == "/runs"


async def test_a_token_that_ends_ends_its_log_ins(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer", expires_at=NOON + 60))
    await browser.page("/runs")
    api.clock.now += 61
    assert (await browser.http.get("/runs")).headers["location"] == "/login?next=%2Fruns"


async def test_revoking_a_token_ends_its_log_ins(api: ApiService) -> None:
    token = api.token("viewer")
    browsers = [await Browser.logged_in(api, token) for _ in range(2)]
    found = api.tokens.find(token)
    assert found is not None and api.tokens.revoke(found.id)
    for browser in browsers:
        assert (await browser.http.get("/runs")).status_code == 303


async def test_the_cookie_is_a_secret_of_its_own_that_is_kept_as_its_hash(api: ApiService) -> None:
    token = api.token("admin")
    first, second = [await Browser.logged_in(api, token) for _ in range(2)]
    cookie = first.http.cookies[COOKIE]
    assert cookie != token and token not in cookie and cookie != second.http.cookies[COOKIE]
    anybody = await api.client(cookie)
    assert (await anybody.get("/v1/runs")).status_code == 401, "it is no token"
    with api.database.read() as connection:
        kept = {
            row.sha256: [str(value) for value in row]
            for row in connection.execute(select(sessions))
        }
    assert hashlib.sha256(cookie.encode()).hexdigest() in kept and cookie not in str(kept)


async def test_a_log_in_ends_by_itself_and_goes_from_the_database(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer"))
    api.clock.now += LASTS_S - 1
    await browser.page("/runs")
    api.clock.now += 1
    assert (await browser.http.get("/runs")).status_code == 303
    await Browser.logged_in(api, api.token("viewer"))
    with api.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(sessions)).scalar_one() == 1


async def test_a_token_has_no_more_than_a_hundred_log_ins(api: ApiService) -> None:
    found = api.tokens.find(api.token("viewer"))
    assert found is not None
    secrets = []
    for _ in range(102):
        api.clock.now += 1
        secrets.append(api.sessions.begin(found.id))
    still = [api.sessions.find(secret) is not None for secret in secrets]
    assert still == [False] * 2 + [True] * 100


async def test_over_tls_the_cookie_is_this_host_s_alone(api: ApiService) -> None:
    secure = {"X-Forwarded-Proto": "https", "Accept": "text/html"}
    http = await api.client(None)
    answer = await http.post("/login", data={"token": api.token("viewer")}, headers=secure)
    set_, gone = sorted(answer.headers.get_list("set-cookie"))
    name, _, cookie = set_.partition(";")[0].partition("=")
    assert (
        name == "__Host-everstep_session"
        and {"Secure", "HttpOnly", "Path=/"} <= set(set_.split("; "))
        and "Domain" not in set_
    )
    assert gone.startswith('everstep_session=""') and "Max-Age=0" in gone, "that without TLS"
    for sent, status in ((name, 200), ("everstep_session", 303)):
        bare = await api.client(None)
        assert (
            await bare.get("/runs", headers={**secure, "Cookie": f"{sent}={cookie}"})
        ).status_code == status
    assert (
        await bare.get("/runs", headers={"Accept": "text/html", "Cookie": f"{name}={cookie}"})
    ).status_code == 303


async def test_logging_out_takes_the_cookie_away(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer"))
    cookie = browser.http.cookies[COOKIE]
    answer = await browser.send("/runs", "/logout")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert (await browser.http.get("/runs")).status_code == 303
    copied = await browser.http.get("/runs", headers={"Cookie": f"{COOKIE}={cookie}"})
    assert copied.status_code == 303, "nor is it worth anything to who copied it"


async def test_a_form_needs_its_secret_and_its_origin(api: ApiService) -> None:
    run_id, _ = await api.running()
    mine, other = api.token("submitter"), api.token("submitter")
    browser = await Browser.logged_in(api, mine)
    session = browser.http.cookies[COOKIE]
    path = f"/runs/{run_id}/cancel"
    for fields in (
        {},
        {"csrf": ""},
        {"csrf": "no.mac"},
        {"csrf": csrf_token(other)},
        {"csrf": csrf_token(mine)},
        {"csrf": "é.é"},
    ):
        assert (await browser.http.post(path, data=fields)).status_code == 403
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert (
            await browser.http.post(path, data={"csrf": csrf_token(session)}, headers=headers)
        ).status_code == 403
    assert status_of(api, run_id) == RunStatus.RUNNING
    same = {"Origin": api.url, "Sec-Fetch-Site": "same-origin"}
    answer = await browser.http.post(path, data={"csrf": csrf_token(session)}, headers=same)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run_id}")
    assert status_of(api, run_id) == RunStatus.STOPPING


async def test_a_log_in_form_from_another_site_is_refused(api: ApiService) -> None:
    http = await api.client(None)
    answer = await http.post(
        "/login", data={"token": api.token("viewer")}, headers={"Origin": "https://evil.example"}
    )
    assert answer.status_code == 403 and "set-cookie" not in answer.headers


async def test_roles_and_projects_hold_on_pages(api: ApiService) -> None:
    run_id, _ = await api.running(project="vision")
    viewer = await Browser.logged_in(api, api.token("viewer", "vision"))
    session = viewer.http.cookies[COOKIE]
    html = await viewer.page(f"/runs/{run_id}")
    assert "/cancel" not in html and "/new" not in html
    for path in (f"/runs/{run_id}/cancel", f"/runs/{run_id}/delete", "/new", "/new/check"):
        assert (await viewer.http.post(path, data={"csrf": csrf_token(session)})).status_code == 403
    assert (
        await viewer.http.post("/cluster/nodes/node-1/cordon", data={"csrf": csrf_token(session)})
    ).status_code == 403
    stranger = await Browser.logged_in(api, api.token("submitter", "speech"))
    for tail in (
        "",
        "/logs",
        "/checkpoints",
        "/events",
        "/spec",
        "/curves.json",
        "/stream",
    ):
        assert (await stranger.http.get(f"/runs/{run_id}{tail}")).status_code == 404
    assert run_id not in await stranger.page("/runs")
    await stranger.page(f"/compare?run={run_id}", 404)
    await stranger.page(f"/new?from={run_id}", 404)
    await viewer.page(f"/new?from={run_id}", 403)
