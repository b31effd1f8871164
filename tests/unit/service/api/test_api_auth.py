"""Nobody without a token, and nobody beyond their project and role."""

from __future__ import annotations

import pytest

from tests.support.api_service import ApiService, spec


async def routes(api: ApiService) -> list[tuple[str, str]]:
    """Every documented (method, path), with parameters filled in."""
    schema = await api.get("/openapi.json")
    run_id = await api.create()
    filled = [
        (method.upper(), path.replace("{run_id}", run_id).replace("{step}", "latest"))
        for path, methods in schema["paths"].items()
        for method in methods
    ]
    assert len(filled) > 20
    return filled


OPEN = {"/healthz", "/readyz"}


@pytest.mark.parametrize(
    "header",
    [None, "Bearer wrong", "Bearer", "Basic dXNlcjpwYXNz", "Bearer \xe4", "evs_x", "Bearer a b"],
)
async def test_no_route_answers_without_a_valid_token(api: ApiService, header: str | None) -> None:
    client = await api.client(None)
    headers = [] if header is None else [(b"Authorization", header.encode("latin-1"))]
    for method, path in await routes(api):
        if path in OPEN:
            continue
        answer = await client.request(method, path, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), (
            method,
            path,
            answer.text,
        )
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_health_and_documentation_answer_without(api: ApiService) -> None:
    client = await api.client(None)
    for path in ("/healthz", "/readyz", "/openapi.json", "/docs"):
        assert (await client.get(path)).status_code == 200, path


async def test_projects_do_not_see_each_other(api: ApiService) -> None:
    mine, theirs = [
        await api.client(api.token("submitter", project)) for project in ("mine", "theirs")
    ]
    made = await mine.post("/v1/runs", json=spec(project="mine"))
    assert made.status_code == 201
    run_id = made.json()["id"]
    for path in ("", "/spec", "/events", "/logs", "/checkpoints/latest/archive"):
        answer = await theirs.get(f"/v1/runs/{run_id}{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path
        unknown = await theirs.get(f"/v1/runs/run_000000000000{path}")
        assert answer.json()["detail"].replace(run_id, "") == unknown.json()["detail"].replace(
            "run_000000000000", ""
        )
    for action in ("cancel", "pause", "resume"):
        assert (await theirs.post(f"/v1/runs/{run_id}/{action}")).status_code == 404
    assert (await theirs.delete(f"/v1/runs/{run_id}")).status_code == 404
    for query in ("", "?project=mine", "?name=digits"):
        assert (await theirs.get(f"/v1/runs{query}")).json() == {"items": [], "next_cursor": None}
    forbidden = await theirs.post("/v1/runs", json=spec(project="mine"))
    assert (forbidden.status_code, forbidden.json()["code"]) == (403, "forbidden")
    assert [item["id"] for item in (await mine.get("/v1/runs")).json()["items"]] == [run_id]
    assert (await mine.post(f"/v1/runs/{run_id}/cancel")).status_code == 202


async def test_keys_of_projects_do_not_meet(api: ApiService) -> None:
    headers = {"Idempotency-Key": "nightly"}
    made = []
    for project in ("a", "b"):
        client = await api.client(api.token("submitter", project))
        made.append(await client.post("/v1/runs", json=spec(project=project), headers=headers))
    assert [answer.status_code for answer in made] == [201, 201]
