"""Projects, tokens, quotas, the audit log and limits, over REST, SDK and command line."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import delete

from everstep import AuthError, Client, Conflict, InvalidSpec, NotFound
from service.api.callers import RateLimit
from service.db.audit import AuditedCall
from service.db.tables import projects
from tests.support.api_service import NOON, ApiService, spec
from tests.support.command_line import everstep


@pytest.fixture
async def api(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path, database_url=database_url) as service:
        service.announce(monkeypatch)
        yield service


async def made_token(api: ApiService, **fields: Any) -> dict[str, Any]:
    body = {"name": "ci", "role": "submitter", "project": "vision", **fields}
    answer = await api.http.post("/v1/tokens?create_project=true", json=body)
    assert answer.status_code == 201, answer.text
    body: dict[str, Any] = answer.json()
    return body


# ---------------------------------------------------------------- projects that are not there


async def test_a_project_by_a_slip_of_the_pen_is_refused_unless_it_is_asked_for(
    api: ApiService,
) -> None:
    assert (await api.http.post("/v1/projects", json={"name": "vision"})).status_code == 201
    token = {"name": "ci", "role": "submitter", "project": "visoin"}
    for path, body, code in (
        ("/v1/runs", spec(project="visoin"), "invalid_spec"),
        ("/v1/tokens", token, "invalid_request"),
    ):
        answer = await api.http.post(path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
        [fault] = answer.json()["errors"]
        assert (
            fault["loc"] == ["project"]
            and "'visoin' does not exist, did you mean vision?" in fault["msg"]
        )
        assert "create_project=true" in fault["msg"]
    names = {item["name"] for item in (await api.get("/v1/projects"))["items"]}
    assert names == {"default", "vision"} and (await api.get("/v1/runs"))["items"] == []
    assert (
        await api.http.post("/v1/runs?create_project=true", json=spec(project="speech"))
    ).status_code == 201
    assert (
        await api.http.post("/v1/tokens?create_project=true", json=token | {"project": "text"})
    ).status_code == 201
    assert {item["name"] for item in (await api.get("/v1/projects"))["items"]} == {
        "default",
        "vision",
        "speech",
        "text",
    }


async def test_the_default_project_and_a_token_s_own_are_always_there(api: ApiService) -> None:
    theirs = await api.client(api.token("submitter", "vision"))
    for client, project in ((api.http, "default"), (theirs, "vision")):
        with api.database.write() as connection:
            connection.execute(delete(projects).where(projects.c.name == project))
        assert (await client.post("/v1/runs", json=spec(project=project))).status_code == 201


async def test_the_command_line_makes_a_project_where_it_is_asked_to(
    api: ApiService, tmp_path: Path
) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec(project="speech")))
    refused = await everstep("submit", str(file))
    assert refused.exit_code == 2 and "--create-project" in refused.stderr
    assert (await everstep("submit", str(file), "--create-project")).exit_code == 0
    assert (await everstep("token", "create", "ci", "--project", "text")).exit_code == 2
    assert (
        await everstep("token", "create", "ci", "--project", "text", "--create-project")
    ).exit_code == 0


# ---------------------------------------------------------------- tokens


async def test_a_token_is_shown_once_used_and_revoked_at_once(api: ApiService) -> None:
    token = await made_token(api, expires_at="2030-01-01T00:00:00Z")
    assert token["token"].startswith("evs_") and token["expires_at"] == "2030-01-01T00:00:00.000Z"
    client = await api.client(token["token"])
    assert (await client.post("/v1/runs", json=spec(project="vision"))).status_code == 201
    assert (await client.post("/v1/runs", json=spec(project="default"))).status_code == 403
    await api.token_use.flush()
    listed = {item["id"]: item for item in (await api.get("/v1/tokens"))["items"]}
    assert "token" not in listed[token["id"]] and token["token"] not in json.dumps(listed)
    assert listed[token["id"]]["last_used_at"] == "2026-05-28T20:26:40.000Z"
    assert (await api.http.delete(f"/v1/tokens/{token['id']}")).status_code == 204
    for _ in range(2):  # the first is of a token that was known
        assert (await client.post("/v1/runs", json=spec(project="vision"))).status_code == 401
    assert (await client.get("/v1/runs")).status_code == 401
    assert len((await api.get("/v1/runs"))["items"]) == 1
    assert (await api.http.delete(f"/v1/tokens/{token['id']}")).status_code == 404
    assert token["id"] not in {item["id"] for item in (await api.get("/v1/tokens"))["items"]}


async def test_a_token_that_can_do_more_than_its_role_says_comes_with_a_warning(
    api: ApiService,
) -> None:
    create = ("token", "create", "ci", "--project", "vision")
    await api.http.post("/v1/projects", json={"name": "vision"})
    assert (await made_token(api))["warning"] is None
    assert "warning" not in (await everstep(*create)).stderr
    api.set(ray_address=None)
    assert (
        "everyone who may submit a run is effectively an administrator"
        in (await made_token(api))["warning"]
    )
    shown = await everstep(*create)
    assert (
        "warning: " in shown.stderr
        and "is effectively an administrator" in shown.stderr
        and shown.stdout.startswith("evs_")
    )
    for harmless in ({"role": "viewer"}, {"role": "admin", "project": None}):
        assert (await made_token(api, **harmless))["warning"] is None


async def test_a_known_token_is_refused_once_it_is_revoked_or_expired(api: ApiService) -> None:
    for end in ("revoked", "expired"):
        token = await made_token(api, expires_at="2030-01-01T00:00:00Z")
        client = await api.client(token["token"])
        assert (await client.get("/v1/runs")).status_code == 200
        if end == "revoked":
            api.tokens.revoke(token["id"])  # as another replica would
        else:
            api.clock.now = datetime(2030, 1, 2, tzinfo=UTC).timestamp()
        for path in ("/v1/runs", "/v1/runs?limit=0"):
            assert (await client.get(path)).status_code == 401, (end, path)


@pytest.mark.parametrize(
    ("fields", "loc"),
    [
        ({"role": "root"}, "role"),
        ({"role": "admin"}, "project"),
        ({"project": None}, "project"),
        ({"project": "Not a name"}, "project"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"expires_at": "2001-01-01T00:00:00Z"}, "expires_at"),
        ({"expires_at": "2030-01-01T00:00:00"}, "expires_at"),
        ({"scope": "all"}, "scope"),
    ],
)
async def test_a_token_that_cannot_be(api: ApiService, fields: dict[str, Any], loc: str) -> None:
    answer = await api.http.post(
        "/v1/tokens", json={"name": "ci", "role": "submitter", "project": "vision", **fields}
    )
    assert answer.status_code == 422, answer.text
    assert [error["loc"] for error in answer.json()["errors"]] == [[loc]]


# ---------------------------------------------------------------- projects and quotas


async def test_quotas_of_a_project_are_set_shown_and_hold(api: ApiService) -> None:
    first = await api.http.post(
        "/v1/projects", json={"name": "vision", "quotas": {"max_queued": 2}}
    )
    again = await api.http.post(
        "/v1/projects", json={"name": "vision", "quotas": {"max_queued": 1, "max_workers": 4}}
    )
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["quotas"] == {"max_workers": 4, "max_running": None, "max_queued": 1}
    await api.create(project="vision")
    refused = await api.http.post(
        "/v1/runs", json=spec(project="vision"), headers={"Idempotency-Key": "k"}
    )
    assert (refused.status_code, refused.json()["code"]) == (409, "quota_exceeded")
    await api.create(project="other")
    assert (await api.get("/v1/projects/vision"))["usage"] == {
        "workers": 0,
        "running": 0,
        "queued": 1,
    }
    assert [item["name"] for item in (await api.get("/v1/projects"))["items"]] == [
        "default",
        "other",
        "vision",
    ]
    assert (await api.http.delete("/v1/projects/vision")).status_code == 409
    assert (await api.http.post("/v1/projects", json={"name": "empty"})).status_code == 201
    assert (await api.http.delete("/v1/projects/empty")).status_code == 204
    assert (await api.http.delete("/v1/projects/empty")).status_code == 404


async def test_a_running_run_counts_as_used(api: ApiService) -> None:
    await api.running(project="vision")
    assert (await api.get("/v1/projects/vision"))["usage"] == {
        "workers": 2,
        "running": 1,
        "queued": 0,
    }


@pytest.mark.parametrize("what", ["projects", "tokens"])
async def test_what_is_deleted_between_two_pages_hides_nothing(api: ApiService, what: str) -> None:
    for name in ("a", "b", "c", "d", "e", "f"):
        made = await api.http.post(
            f"/v1/{what}",
            json={"name": name} if what == "projects" else {"name": name, "role": "admin"},
        )
        assert made.status_code == 201
    key = {"projects": "name", "tokens": "id"}[what]
    all_keys = [item[key] for item in (await api.get(f"/v1/{what}?limit=500"))["items"]]
    page = await api.get(f"/v1/{what}?limit=4")
    for item in page["items"]:
        if item["name"] in "abcdef":
            assert (await api.http.delete(f"/v1/{what}/{item[key]}")).status_code == 204
    rest = await api.get(f"/v1/{what}?limit=500&cursor={page['next_cursor']}")
    assert [item[key] for item in (*page["items"], *rest["items"])] == all_keys
    for cursor in ("4", "x", "WzFd"):  # the last one is [1]
        refused = await api.http.get(f"/v1/{what}?cursor={cursor}")
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request"), cursor


# ---------------------------------------------------------------- audit log


async def test_every_call_that_may_change_something_is_in_the_audit_log(api: ApiService) -> None:
    token = await made_token(api)
    client = await api.client(token["token"])
    run_id = (
        await client.post("/v1/runs", json=spec(project="vision"), headers={"Idempotency-Key": "k"})
    ).json()["id"]
    await client.post("/v1/runs", json=spec(project="vision"), headers={"Idempotency-Key": "k"})
    await client.post("/v1/runs", json={"name": "a"})
    await client.post(f"/v1/runs/{run_id}/cancel")
    await client.post("/v1/tokens", json={})
    await client.get("/v1/runs")
    await (await api.client("wrong")).post(f"/v1/runs/{run_id}/cancel")
    assert (await api.http.delete("/v1/tokens/tok_none")).status_code == 404
    items = (await api.get(f"/v1/audit?token_id={token['id']}"))["items"]
    assert [(item["method"], item["path"], item["target"], item["status"]) for item in items] == [
        ("POST", "/v1/tokens", None, 403),
        ("POST", f"/v1/runs/{run_id}/cancel", run_id, 202),
        ("POST", "/v1/runs", None, 422),
        ("POST", "/v1/runs", run_id, 200),
        ("POST", "/v1/runs", run_id, 201),
    ]
    assert {(item["token_name"], item["role"], item["address"]) for item in items} == {
        ("ci", "submitter", "127.0.0.1")
    }
    assert {item["at"] for item in items} == {"2026-05-28T20:26:40.000Z"}
    everything = await api.get("/v1/audit?limit=500")
    assert [item["target"] for item in everything["items"]][-1] == token["id"]
    assert token["token"] not in json.dumps(everything)
    page = await api.get("/v1/audit?limit=2")
    assert [(item["seq"], item["status"]) for item in page["items"]] == [
        (7, 404),
        (6, 403),
    ] and page["next_cursor"] == "6"
    assert [item["seq"] for item in (await api.get("/v1/audit?limit=500&cursor=6"))["items"]] == [
        5,
        4,
        3,
        2,
        1,
    ]


async def test_the_log_knows_how_a_call_ended_before_its_caller_does(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = api.audit.complete

    def slowly(entry: AuditedCall) -> None:
        time.sleep(0.3)
        complete(entry)

    monkeypatch.setattr(api.audit, "complete", slowly)
    assert (await api.http.delete("/v1/tokens/tok_none")).status_code == 404
    assert (await api.get("/v1/audit?limit=1"))["items"][0]["status"] == 404


# ---------------------------------------------------------------- limits


async def test_who_asks_too_often_is_told_when_to_come_back(api: ApiService) -> None:
    seconds = 0.0
    api.door.rate_limit = RateLimit(2.0, lambda: seconds)
    other = await api.client(api.token("viewer", "default"))
    statuses = [(await api.http.get("/v1/catalog")).status_code for _ in range(5)]
    assert statuses == [200, 200, 200, 200, 429], "twice the rate at once"
    refused = await api.http.get("/v1/catalog")
    assert (refused.json()["code"], refused.headers["retry-after"]) == ("rate_limited", "1")
    assert (await other.get("/v1/catalog")).status_code == 200, "each token has its own"
    seconds = 0.5
    assert (await api.http.get("/v1/catalog")).status_code == 200
    assert (await api.http.get("/v1/catalog")).status_code == 429


@pytest.mark.parametrize("path", ["/v1/cluster/nodes/node-1/cordon", "/v1/tokens", "/v1/runs"])
async def test_no_route_reads_a_body_beyond_its_limit(api: ApiService, path: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    for body in (b'"' + b"x" * (2 << 20) + b'"', chunks()):
        answer: httpx.Response = await api.http.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


# ---------------------------------------------------------------- SDK and command line


async def test_the_sdk_makes_lists_and_revokes(api: ApiService) -> None:
    def story() -> None:
        client = Client()
        assert client.projects.create("vision", max_workers=8).quotas.max_workers == 8
        assert client.projects.get("vision").usage.queued == 0
        until = datetime.fromtimestamp(NOON, UTC) + timedelta(days=1)
        made = client.tokens.create(
            "ci", role="submitter", project="vision", expires_at=until, create_project=True
        )
        assert (
            made.expires_at == until
            and made.token not in repr(made)
            and made.token not in str(made)
        )
        theirs = Client(token=made.token)
        with pytest.raises(AuthError, match="needs the role admin"):
            list(theirs.tokens.list())
        with pytest.raises(AuthError):
            theirs.projects.create("mine")
        with pytest.raises(InvalidSpec, match="a viewer belongs to a project"):
            client.tokens.create("v", role="viewer")
        with pytest.raises(Conflict, match="1 tokens"):
            client.projects.delete("vision")
        client.tokens.revoke(made.id)
        with pytest.raises(AuthError):
            next(theirs.runs.list(), None)
        client.projects.delete("vision")
        with pytest.raises(NotFound):
            client.projects.get("vision")
        assert [call.status for call in client.audit.list()][:2] == [204, 204]

    await asyncio.to_thread(story)


async def test_a_viewer_of_all_projects_is_made_on_purpose_only(api: ApiService) -> None:
    body = {"name": "wall", "role": "viewer", "all_projects": True}
    made = (await api.http.post("/v1/tokens", json=body)).json()
    assert made["project"] is None and made["role"] == "viewer"
    run_id = await api.create(project="vision")
    viewer = await api.client(made["token"])
    assert (await viewer.get(f"/v1/runs/{run_id}")).status_code == 200
    for path in (f"/v1/runs/{run_id}/cancel", "/v1/runs"):
        assert (await viewer.post(path, json=spec())).status_code == 403
    for wrong in (
        {"role": "viewer"},
        {"role": "viewer", "project": "vision", "all_projects": True},
        {"role": "submitter", "all_projects": True},
        {"role": "admin", "all_projects": True},
    ):
        refused = await api.http.post("/v1/tokens", json={"name": "x", **wrong})
        assert refused.status_code == 422, wrong
    printed = await everstep("token", "create", "tv", "--role", "viewer", "--all-projects")
    assert printed.exit_code == 0 and "a viewer of every project" in printed.stderr
