"""Logging in at a real identity provider: django-oauth-toolkit, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from service.annexes.access.provider import CALLBACK_PATH, Provider
from service.model.operator_rules import GrantRule, ProviderRule
from service.web.session import COOKIE, csrf_token
from tests.support.api_service import ApiService, spec
from tests.support.oidc_provider import OidcProvider, path_of
from tests.support.web_browser import Browser

GRANTS = ("ops=admin", "vision=submitter:vision", "speech=viewer:speech", "all=viewer:*")


@pytest.fixture(scope="module")
def idp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OidcProvider]:
    with OidcProvider(tmp_path_factory.mktemp("idp")) as provider:
        yield provider


@pytest.fixture
async def api(tmp_path: Path, idp: OidcProvider) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path) as service:
        use(service, idp, service.url)
        idp.set(user="ada", groups=["vision", "speech", "staff"])
        idp.set(redirect_uri=service.url + CALLBACK_PATH)
        yield service


def use(service: ApiService, idp: OidcProvider, public_url: str) -> None:
    """Let a service of a test know the provider, and the time that the provider's tokens tell."""
    service.clock.now = time.time()
    rule = ProviderRule(
        issuer=idp.issuer,
        client_id=idp.client_id,
        client_secret=idp.client_secret,
        scopes="openid email",
        groups_claim="groups",
        grants=GrantRule.of(GRANTS),
        lasts_s=3600.0,
        label="Example",
    )
    service.parts.add(Provider(rule, public_url + CALLBACK_PATH, time.time))


async def visitor(api: ApiService) -> httpx.AsyncClient:
    http = await api.client(None)
    http.headers.update({"Accept": "text/html", "User-Agent": "Test/1.0"})
    return http


async def callback_of(api: ApiService, idp: OidcProvider, http: httpx.AsyncClient) -> str:
    """Begin a log-in, log in at the provider as ada; return where it sends the browser."""
    begun = await http.get("/login/oidc?next=/runs?status=failed")
    assert begun.status_code == 303, begun.text
    return path_of(await idp.callback(begun.headers["location"], "ada"))


async def logged_in(api: ApiService, idp: OidcProvider) -> Browser:
    http = await visitor(api)
    answer = await http.get(await callback_of(api, idp, http))
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs?status=failed")
    return Browser(http)


async def test_a_person_logs_in_and_owns_what_they_submit(
    api: ApiService, idp: OidcProvider
) -> None:
    assert 'href="/login/oidc?next=/runs"' in (await (await visitor(api)).get("/login")).text
    browser = await logged_in(api, idp)
    html = await browser.page("/account")
    assert "ada@example.org" in html and "submitter of vision" in html and "Test/1.0" in html
    set_ = browser.http.cookies
    assert "everstep_flow" not in set_ and len(set_[COOKIE]) >= 40
    found = api.sessions.find(set_[COOKIE])
    assert found is not None
    assert (found.owner, found.role, found.project) == ("ada@example.org", "submitter", "vision")


async def test_the_request_has_pkce_state_and_nonce_and_the_cookie_is_this_browser_s(
    api: ApiService,
) -> None:
    secure = {"X-Forwarded-Proto": "https"}
    begun = await (await visitor(api)).get("/login/oidc?next=//evil.example", headers=secure)
    query = parse_qs(urlsplit(begun.headers["location"]).query)
    assert query["code_challenge_method"] == ["S256"] and query["response_type"] == ["code"]
    assert min(len(query[name][0]) for name in ("state", "nonce", "code_challenge")) >= 43
    cookie = begun.headers["set-cookie"]
    assert cookie.startswith("__Host-everstep_flow=")
    assert {"Secure", "HttpOnly", "SameSite=lax", "Path=/"} <= set(cookie.split("; "))


async def test_a_link_cannot_send_the_log_in_elsewhere(api: ApiService, idp: OidcProvider) -> None:
    http = await visitor(api)
    begun = await http.get("/login/oidc?next=https://evil.example/")
    back = await http.get(path_of(await idp.callback(begun.headers["location"], "ada")))
    assert back.headers["location"] == "/runs"


async def test_an_answer_works_once_and_in_its_own_browser(
    api: ApiService, idp: OidcProvider
) -> None:
    http, other = await visitor(api), await visitor(api)
    callback = await callback_of(api, idp, http)
    flow = http.cookies["everstep_flow"]
    stolen = await other.get(callback)
    assert stolen.status_code == 403 and COOKIE not in stolen.headers.get("set-cookie", "")
    await other.get("/login/oidc")
    assert (await other.get(callback)).status_code == 403, "another log-in's state"
    assert (await http.get(callback)).status_code == 303
    again = await http.get(callback)
    assert again.status_code == 403 and "not begun in this browser" in again.text
    replay = await visitor(api)
    replay.cookies.set("everstep_flow", flow)
    replayed = await replay.get(callback)
    assert replayed.status_code == 403 and "invalid_grant" in replayed.text
    assert COOKIE not in replay.cookies


async def test_a_code_needs_the_verifier_of_its_log_in(api: ApiService, idp: OidcProvider) -> None:
    http, other = await visitor(api), await visitor(api)
    code = parse_qs(urlsplit(await callback_of(api, idp, http)).query)["code"][0]
    begun = await other.get("/login/oidc")
    state = parse_qs(urlsplit(begun.headers["location"]).query)["state"][0]
    injected = await other.get(f"{CALLBACK_PATH}?code={code}&state={state}")
    assert injected.status_code == 403 and "invalid_grant" in injected.text


async def test_groups_that_are_gone_at_the_next_log_in_take_their_rights_along(
    api: ApiService, idp: OidcProvider
) -> None:
    browser = await logged_in(api, idp)
    answer = await browser.send(
        "/account", "/account/tokens", label="ci", role="submitter", days=30
    )
    [secret] = [word for word in answer.text.split() if "evs_" in word]
    personal = await api.client(secret.removeprefix("<code>").removesuffix("</code>"))
    made = await personal.post("/v1/runs", json=spec(project="vision"))
    assert made.status_code == 201, made.text
    idp.set(user="ada", groups=["speech"])
    fewer = await logged_in(api, idp)
    assert (await browser.http.get("/runs")).status_code == 303, "the session of lost rights"
    assert (await personal.get("/v1/runs")).status_code == 401, "the token that they covered"
    assert "viewer of speech" in await fewer.page("/account")
    idp.set(user="ada", groups=[])
    http = await visitor(api)
    refused = await http.get(await callback_of(api, idp, http))
    assert refused.status_code == 403 and "has no rights here" in refused.text
    assert (await fewer.http.get("/runs")).status_code == 303


async def test_a_session_uses_one_of_several_rights(api: ApiService, idp: OidcProvider) -> None:
    browser = await logged_in(api, idp)
    user = api.sessions.find(browser.http.cookies[COOKIE])
    assert user is not None and user.user_id is not None
    grants = {row.project: row for row in api.tokens.of_user(user.user_id, "log_in")}
    assert set(grants) == {"vision", "speech"}
    await browser.send("/account", "/account/rights", token_id=grants["speech"].id)
    assert "viewer of speech" in await browser.page("/account")
    stranger = api.tokens.find(api.token("admin"))
    assert stranger is not None
    refused = await browser.send("/account", "/account/rights", token_id=stranger.id)
    assert refused.status_code == 404


async def test_sessions_are_listed_and_ended_by_their_user_and_by_an_administrator(
    api: ApiService, idp: OidcProvider
) -> None:
    first, second, third = [await logged_in(api, idp) for _ in range(3)]
    listed = (await api.get("/v1/sessions"))["items"]
    assert [each["name"] for each in listed] == ["ada@example.org"] * 3
    assert listed[0]["browser"] == "Test/1.0" and listed[0]["address"] == "127.0.0.1"
    gone = await api.http.delete(f"/v1/sessions/{listed[0]['id']}")
    assert gone.status_code == 204
    alive = [each for each in (first, second, third) if await reaches(each)]
    assert len(alive) == 2
    stranger = await api.client(api.token("viewer"))
    assert (await stranger.get("/v1/sessions")).json()["items"] == []
    assert (await stranger.delete(f"/v1/sessions/{listed[1]['id']}")).status_code == 404
    html = await alive[0].page("/account")
    assert html.count("this browser") == 1
    session = alive[0].http.cookies[COOKIE]
    await alive[0].http.post("/account/sessions/end", data={"csrf": csrf_token(session)})
    assert await reaches(alive[0]) and not await reaches(alive[1])
    assert (await alive[0].http.post("/account/sessions/end")).status_code == 403


async def reaches(browser: Browser) -> bool:
    return (await browser.http.get("/runs")).status_code == 200


async def test_a_session_ends_at_its_time(api: ApiService, idp: OidcProvider) -> None:
    browser = await logged_in(api, idp)
    api.clock.now += 3599
    assert await reaches(browser)
    api.clock.now += 2
    assert not await reaches(browser)


async def test_another_replica_finishes_and_ends_a_log_in(
    api: ApiService, idp: OidcProvider, tmp_path: Path
) -> None:
    async with ApiService(tmp_path) as replica:
        use(replica, idp, api.url)
        http = await visitor(api)
        callback = await callback_of(api, idp, http)
        elsewhere = await visitor(replica)
        elsewhere.cookies.update(http.cookies)
        assert (await elsewhere.get(callback)).status_code == 303
        http.cookies.update(elsewhere.cookies)
        assert await reaches(Browser(http)), "the session holds on both"
        out = await Browser(elsewhere).send("/runs", "/logout")
        assert out.status_code == 303
        assert not await reaches(Browser(http))


async def test_without_a_provider_there_is_no_such_page(tmp_path: Path) -> None:
    async with ApiService(tmp_path / "other") as api:
        http = await visitor(api)
        assert (await http.get("/login/oidc")).status_code == 404
        assert "/login/oidc" not in (await http.get("/login")).text


async def test_a_provider_that_is_away_is_told_and_tokens_still_log_in(
    api: ApiService, idp: OidcProvider
) -> None:
    provider = api.parts[Provider]
    assert provider is not None
    away = ProviderRule(**{**vars(provider.rule), "issuer": "http://127.0.0.1:9/o"})
    api.parts.add(Provider(away, api.url + CALLBACK_PATH))
    answer = await (await visitor(api)).get("/login/oidc")
    assert answer.status_code == 503 and "does not answer" in answer.text
    await Browser.logged_in(api, api.token("viewer"))
