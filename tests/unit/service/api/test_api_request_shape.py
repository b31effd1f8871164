"""What all routes do alike: HEAD as GET, Allow over all methods, no unknown query parameters."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.api_service import ApiService
from tests.support.web_browser import Browser


async def test_a_query_parameter_that_a_route_lacks_is_refused_by_name(api: ApiService) -> None:
    await api.create()
    refused = await api.http.get("/v1/runs?stauts=RUNNING&limit=3")
    assert refused.status_code == 422 and refused.json()["code"] == "invalid_request"
    [fault] = refused.json()["errors"]
    assert fault["loc"] == ["stauts"] and "did you mean status?" in fault["msg"]
    both = (await api.http.get("/v1/runs?a=1&b=2")).json()["errors"]
    assert [fault["loc"] for fault in both] == [["a"], ["b"]]
    assert "which has none" in (await api.http.get("/v1/catalog?x=1")).json()["detail"]
    posted = await api.http.post("/v1/runs?create=true", json={})
    assert posted.status_code == 422 and "create_project" in posted.json()["detail"]
    assert (await api.http.get("/v1/runs?status=RUNNING&limit=3&search=x")).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/v1/runs", "/openapi.json"])
async def test_head_answers_as_get_without_the_body(
    api: ApiService, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    got, head = await api.http.get(path), await api.http.head(path)
    assert head.status_code == got.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    await api.get("/healthz")
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []


async def test_head_of_a_stream_ends_and_of_nothing_is_404(api: ApiService) -> None:
    run_id, _ = await api.running()
    async with asyncio.timeout(10):  # a stream would go on until the run ends
        head = await api.http.head(
            f"/v1/runs/{run_id}/events?after=9999", headers={"Accept": "text/event-stream"}
        )
    assert head.status_code == 200 and "text/event-stream" in head.headers["content-type"]
    await api.get("/healthz")
    assert api.followers.num_open == 0, "nobody reads what is streamed"
    assert (await api.http.head("/v1/runs/none")).status_code == 404
    assert (await (await api.client(None)).head("/v1/runs")).status_code == 401


async def test_allow_names_the_methods_of_all_routes(api: ApiService) -> None:
    run_id = await api.create()
    for method, path, allowed in (
        ("PUT", "/v1/runs", "GET, HEAD, POST"),
        ("POST", f"/v1/runs/{run_id}", "DELETE, GET, HEAD, PATCH"),
        ("GET", f"/v1/runs/{run_id}/cancel", "POST"),
        ("PATCH", "/v1/projects", "GET, HEAD, POST"),
    ):
        refused = await api.http.request(method, path)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed), path
        assert refused.json()["code"] == "method_not_allowed" and allowed in refused.text


async def test_a_path_that_does_not_exist_is_a_page_in_a_browser(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("admin"))
    html = await browser.page("/no/such/page", 404)
    assert "<h1>Not found</h1>" in html and 'href="/runs"' in html
    stranger = await api.client(None)
    answer = await stranger.get("/no/such/page", headers={"Accept": "text/html,*/*"})
    assert answer.status_code == 404 and "<h1>Not found</h1>" in answer.text
    program = await api.http.get("/no/such/page")
    assert program.headers["content-type"] == "application/problem+json"
    assert program.json()["code"] == "not_found"
    assert (await browser.http.head("/runs")).status_code == 200
