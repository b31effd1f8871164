"""Every route for every role, from OpenAPI: a route that is missing here fails, and so does one
that is here and nowhere else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.types import Message

from service.process.app import create_app
from tests.support.api_service import ApiService

OPEN = {("GET", "/healthz"), ("GET", "/readyz")}
"""Without any token."""

LEAST_ROLE = {
    ("POST", "/v1/runs"): "submitter",
    ("POST", "/v1/validate"): "submitter",
    ("GET", "/v1/runs"): "viewer",
    ("GET", "/v1/runs/{run_id}"): "viewer",
    ("PATCH", "/v1/runs/{run_id}"): "submitter",
    ("DELETE", "/v1/runs/{run_id}"): "submitter",
    ("GET", "/v1/runs/{run_id}/spec"): "viewer",
    ("POST", "/v1/runs/{run_id}/cancel"): "submitter",
    ("POST", "/v1/runs/{run_id}/pause"): "submitter",
    ("POST", "/v1/runs/{run_id}/resume"): "submitter",
    ("GET", "/v1/runs/{run_id}/attempts"): "viewer",
    ("GET", "/v1/runs/{run_id}/events"): "viewer",
    ("GET", "/v1/runs/{run_id}/failures"): "viewer",
    ("GET", "/v1/runs/{run_id}/goodput"): "viewer",
    ("GET", "/v1/runs/{run_id}/samples"): "viewer",
    ("GET", "/v1/runs/{run_id}/metrics"): "viewer",
    ("GET", "/v1/runs/{run_id}/logs"): "viewer",
    ("GET", "/v1/runs/{run_id}/tensorboard"): "viewer",
    ("GET", "/v1/runs/{run_id}/tensorboard/{name}"): "viewer",
    ("GET", "/v1/runs/{run_id}/checkpoints"): "viewer",
    ("GET", "/v1/runs/{run_id}/checkpoints/{step}"): "viewer",
    ("GET", "/v1/runs/{run_id}/checkpoints/{step}/archive"): "viewer",
    ("POST", "/v1/runs/{run_id}/checkpoints/{step}/verify"): "submitter",
    ("GET", "/v1/runs/{run_id}/drills"): "viewer",
    ("GET", "/v1/runs/{run_id}/drills/{drill_id}"): "viewer",
    ("POST", "/v1/runs/{run_id}/drills"): "admin",
    ("GET", "/v1/runs/{run_id}/replays"): "viewer",
    ("POST", "/v1/runs/{run_id}/replays"): "submitter",
    ("GET", "/v1/runs/{run_id}/profiles"): "viewer",
    ("GET", "/v1/runs/{run_id}/profiles/{profile_id}"): "viewer",
    ("GET", "/v1/runs/{run_id}/profiles/{profile_id}/trace"): "viewer",
    ("POST", "/v1/runs/{run_id}/profiles"): "submitter",
    ("GET", "/v1/runs/{run_id}/rehearsal"): "viewer",
    ("GET", "/v1/runs/{run_id}/stacks"): "viewer",
    ("POST", "/v1/runs/{run_id}/stacks"): "submitter",
    ("GET", "/v1/catalog"): "viewer",
    ("GET", "/v1/cluster"): "viewer",
    ("POST", "/v1/cluster/nodes/{node_id}/cordon"): "admin",
    ("POST", "/v1/cluster/nodes/{node_id}/uncordon"): "admin",
    ("POST", "/v1/cluster/nodes/{node_id}/drain"): "admin",
    ("POST", "/v1/cluster/checks"): "admin",
    ("GET", "/v1/cluster/checks/{check_id}"): "admin",
    ("GET", "/v1/projects"): "admin",
    ("POST", "/v1/projects"): "admin",
    ("GET", "/v1/projects/{project}"): "admin",
    ("DELETE", "/v1/projects/{project}"): "admin",
    ("GET", "/v1/tokens"): "admin",
    ("POST", "/v1/tokens"): "admin",
    ("DELETE", "/v1/tokens/{token_id}"): "admin",
    ("GET", "/v1/sessions"): "viewer",
    ("DELETE", "/v1/sessions/{session_id}"): "viewer",
    ("GET", "/v1/audit"): "admin",
    ("GET", "/v1/alerts"): "admin",
    ("POST", "/v1/alerts"): "admin",
    ("DELETE", "/v1/alerts/{alert_id}"): "admin",
    ("POST", "/v1/alerts/{alert_id}/test"): "admin",
    ("GET", "/v1/alerts/{alert_id}/deliveries"): "admin",
    ("POST", "/v1/alerts/{alert_id}/deliveries/{delivery_id}/retry"): "admin",
    ("GET", "/v1/storage"): "admin",
    ("POST", "/v1/storage/adopt"): "admin",
    ("GET", "/v1/runs/{run_id}/stragglers"): "viewer",
    ("GET", "/v1/goodput"): "viewer",
    ("GET", "/v1/schema"): "viewer",
    ("POST", "/v1/code"): "submitter",
    ("GET", "/metrics"): "admin",
}
"""The least role that may use each route, of the run's project where there is one."""

ROLES = ("viewer", "submitter", "admin")
BODIES = {
    # a fault of the spec is found after the role
    "/v1/runs": {"name": "a"},
    "/v1/validate": {"name": "a"},
    "/v1/projects": {"name": "vision"},
    "/v1/alerts": {"name": "a", "when": "failed", "format": "json", "url": "https://a.example"},
    "/v1/tokens": {"name": "t", "role": "admin"},
    "/v1/runs/{run_id}/drills": {"kind": "kill_worker"},
    "/v1/runs/{run_id}/profiles": {"rank": 0},
    "/v1/runs/{run_id}/replays": {"from_step": 0, "to_step": 1},
}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path, drills=True) as service:
        yield service


async def test_every_route_has_its_place_in_the_matrix(api: ApiService) -> None:
    paths = (await api.get("/openapi.json"))["paths"]
    routes = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert routes - LEAST_ROLE.keys() - OPEN == set(), "say in LEAST_ROLE who may use these"
    assert (LEAST_ROLE.keys() | OPEN) - routes == set(), "these are no routes any more"


async def test_each_role_gets_as_far_as_it_may(api: ApiService) -> None:
    clients = {
        "viewer": await api.client(api.token("viewer", "default")),
        "submitter": await api.client(api.token("submitter", "default")),
        "admin": api.http,
        "stranger": await api.client(api.token("submitter", "elsewhere")),
    }
    for (method, route), least in LEAST_ROLE.items():
        for who, client in clients.items():
            run_id = await api.create() if "{run_id}" in route else ""
            names = {
                "run_id": run_id,
                "step": "latest",
                "drill_id": "drill_x",
                "profile_id": "prof_x",
                "node_id": "node-1",
                "session_id": "ses_none",
                "name": "events.out.tfevents.1.everstep.s001",
                "alert_id": "alr_none",
                "delivery_id": "dlv_none",
            }
            path = route.format(**names, project="none", token_id="tok_none", check_id="check_none")
            answer = await client.request(
                method, path, json=BODIES.get(route) if method == "POST" else None
            )
            case = (method, route, who, answer.status_code, answer.text[:200])
            if who == "stranger" and run_id:
                assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), case
            elif ROLES.index("submitter" if who == "stranger" else who) < ROLES.index(least):
                assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), case
            else:
                assert answer.status_code not in (401, 403, 500), case


class Untouched:
    """An ASGI request whose body nobody may read: it would never arrive."""

    def __init__(self, method: str, path: str, token: str | None, query: str = "") -> None:
        headers = [(b"host", b"x"), (b"content-type", b"text/plain"), (b"content-length", b"9")]
        if token is not None:
            headers.append((b"authorization", f"Bearer {token}".encode()))
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.statuses: list[int] = []

    async def receive(self) -> Message:
        raise AssertionError("the body is read before the caller is known")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])

    async def status_of(self, app: FastAPI) -> int:
        await app(self.scope, self.receive, self.send)
        [status] = self.statuses
        return status


async def test_nobody_s_body_is_read_before_it_is_known_who_they_are(api: ApiService) -> None:
    """Every route refuses who may not use it, whatever the body is, and without waiting for it."""
    app = create_app(api.parts)
    run_id = await api.create()
    names = dict.fromkeys(
        ("step", "drill_id", "profile_id", "session_id", "name", "alert_id", "delivery_id"), "x"
    ) | {"run_id": run_id, "node_id": "node-1", "check_id": "check_x"}
    names |= {"project": "none", "token_id": "tok_none"}
    tokens = {
        "viewer": api.token("viewer", "default"),
        "submitter": api.token("submitter", "default"),
        "stranger": api.token("submitter", "elsewhere"),
    }
    tried = 0
    for (method, route), least in LEAST_ROLE.items():
        path = route.format(**names)
        for query in ("", "typo=1"):
            nobody = await Untouched(method, path, None, query).status_of(app)
            assert nobody == 401, (method, route, query)
        for who, token in tokens.items():
            if who == "stranger" and "{run_id}" in route:
                expected = 404
            elif ROLES.index("submitter" if who == "stranger" else who) < ROLES.index(least):
                expected = 403
            else:
                continue
            refused = await Untouched(method, path, token).status_of(app)
            assert refused == expected, (method, route, who)
            tried += 1
    assert tried > 100
