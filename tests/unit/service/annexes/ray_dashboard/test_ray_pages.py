"""Ray's dashboard under our log-in: who may ask what of it, and what reaches either side."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from service.annexes.ray_dashboard import relay as ray_dashboard
from service.annexes.ray_dashboard.relay import RayDashboard, access_to
from service.api.answers import ServiceLinks
from service.cluster.ray_jobs import RayEndpoint, RayJobs
from service.model.rows import AuditRow
from tests.support.api_service import ApiService
from tests.support.service_process import free_port
from tests.support.telling_dashboard import TellingDashboard, telling_dashboard
from tests.support.web_browser import Browser

PROFILE = "/ray/worker/traceback?pid=1&ip=10.0.0.1"
SAME_SITE = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}

NOT_PASSED_ON = {
    "api/job_agent/jobs/ID/logs": "of the agents",
    "api/job_agent/jobs/ID/logs/tail": "of the agents",
    "api/jobs/ID/logs/tail": "a WebSocket, which no page opens",
    "api/packages/ID/ID": "reads whether a package of another job is there; no page asks",
    "api/component_activities": "calls a hook of the cluster's operator",
    "api/prometheus/sd": "addresses for Prometheus",
    "api/v0/delay/ID": "holds a request back",
    "api/healthz": "of the agents",
    "api/local_raylet_healthz": "of the agents",
    "cluster_id": "for Ray's usage statistics",
    "test/dump": "everything in the memory of Ray's head",
    "": "answered by the service itself",
    "favicon.ico": "answered by the service itself",
    "api/authentication_mode": "answered by the service itself",
}
"""GET routes of Ray's dashboard that are not passed on, and why."""


@pytest.fixture
async def ray() -> AsyncIterator[TellingDashboard]:
    async with telling_dashboard() as dashboard:
        yield dashboard


@pytest.fixture
async def api(tmp_path: Path, ray: TellingDashboard) -> AsyncIterator[ApiService]:
    def endpoint() -> RayEndpoint:
        return RayEndpoint(ray.url, "ray-token")

    async with (
        ApiService(tmp_path) as service,
        RayDashboard(endpoint) as dashboard,
        RayJobs(endpoint) as jobs,
    ):
        service.parts.add(dashboard)
        service.parts.add(jobs)
        yield service


async def browser_of(api: ApiService, role: str, project: str | None = None) -> httpx.AsyncClient:
    return (await Browser.logged_in(api, api.token(role, project))).http  # type: ignore[arg-type]


def rays_folder() -> Path:
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "dashboard"


def rays_routes() -> set[tuple[str, str]]:
    """Method and path of every route of the installed dashboard, with ID for what varies."""
    found = set()
    for file in rays_folder().rglob("*.py"):
        for method, path in re.findall(
            r"@routes\.(get|post|put|delete|patch|view|head)\(\s*\"([^\"]*)\"", file.read_text()
        ):
            found.add((method.upper(), re.sub(r"\{[^}]*\}", "ID", path.lstrip("/"))))
    return found


async def test_every_route_of_ray_has_its_place(api: ApiService, ray: TellingDashboard) -> None:
    routes = rays_routes()
    assert len(routes) > 50
    reads = {path for method, path in routes if method == "GET"}
    media = {path for path in reads if path == "api/v0/logs/ID"}  # ID is file or stream
    assert media and access_to("api/v0/logs/file") is access_to("api/v0/logs/stream")
    known = {path for path in reads if access_to(path)}
    assert reads - known - media == NOT_PASSED_ON.keys(), "say whether viewers may ask for these"
    admin = await browser_of(api, "admin")
    for method, path in sorted(routes):
        if method == "GET" and path in known:
            continue
        answer = await admin.request(method, f"/ray/{path}", headers=SAME_SITE)
        expected = {404} if method == "GET" else {405}
        if method == "GET" and path in ("", "favicon.ico", "api/authentication_mode"):
            expected = {200}
        assert answer.status_code in expected, (method, path, answer.status_code)
    assert {(method, path) for method, path, _ in ray.asked} <= {("GET", "/api/version")}


@pytest.mark.parametrize(
    "path",
    [
        "nodes/%2e%2e",
        "nodes/%2e%2e/test/dump",
        "api/jobs/a%2fstop",
        "/nodes",
        "nodes/",
        "api/v0/logs/x",
    ],
)
async def test_no_other_spelling_gets_through(
    api: ApiService, ray: TellingDashboard, path: str
) -> None:
    admin = await browser_of(api, "admin")
    request = admin.build_request("GET", f"{api.url}/ray/x")
    request.url = request.url.copy_with(raw_path=f"/ray/{path}".encode())
    assert (await admin.send(request)).status_code == 404
    assert ray.asked == []


async def test_only_people_who_see_all_projects_get_in(
    api: ApiService, ray: TellingDashboard
) -> None:
    nobody = await api.client(None)
    there = await nobody.get("/ray/", headers={"Accept": "text/html"})
    assert (there.status_code, there.headers["location"]) == (303, "/login?next=%2Fray%2F")
    assert (await nobody.get("/ray/nodes")).status_code == 401
    by_token = await api.client(api.token("admin"))
    assert (await by_token.get("/ray/nodes")).status_code == 401  # pages take no bearer token
    for role in ("viewer", "submitter", "admin"):
        http = await browser_of(api, role, "vision")
        refused = await http.get("/ray/")
        assert refused.status_code == 403 and "runs of all projects" in refused.text
        assert (await http.get("/ray/api/jobs/")).status_code == 403
        assert (await http.get("/ray-jobs/raysubmit_1")).status_code == 403
    assert ray.asked == []
    viewer = await browser_of(api, "viewer")
    assert (await viewer.get("/ray/nodes?view=summary")).status_code == 200
    assert [asked[:2] for asked in ray.asked] == [("GET", "/nodes?view=summary")]


async def test_the_link_is_shown_to_those_who_may_follow_it(api: ApiService) -> None:
    run_id, _ = await api.running(project="vision")
    link = f'href="/ray/#/jobs/{run_id}-s001"'
    assert link in (await (await browser_of(api, "viewer")).get(f"/runs/{run_id}")).text
    api.parts.add(ServiceLinks(api.cluster, "https://everstep.example", relays_ray=True))
    links = (await api.get(f"/v1/runs/{run_id}"))["links"]
    assert links["ray_dashboard"] == "https://everstep.example/ray"
    assert links["ray_job"] == f"https://everstep.example/ray/#/jobs/{run_id}-s001"
    restricted = await browser_of(api, "admin", "vision")
    assert "/ray/" not in (await restricted.get(f"/runs/{run_id}")).text
    assert "/ray/" not in (await restricted.get("/cluster")).text


async def test_each_side_gets_what_is_meant_for_it_and_no_more(
    api: ApiService, ray: TellingDashboard
) -> None:
    ray.answers["/api/jobs/"] = JSONResponse(
        [{"job_id": "1"}],
        headers={"Set-Cookie": "ray-token=x", "Access-Control-Allow-Origin": "*", "X-Ray": "1"},
    )
    viewer = await browser_of(api, "viewer")
    sent = {"Authorization": "Bearer evs_mine", "Origin": api.url, "Referer": api.url, **SAME_SITE}
    answer = await viewer.get("/ray/api/jobs/", headers=sent)
    assert answer.json() == [{"job_id": "1"}]
    [(_, _, headers)] = ray.asked
    assert headers["authorization"] == "Bearer ray-token"
    assert headers.keys() <= {
        "host", "connection", "user-agent", "accept", "accept-encoding", "authorization"
    }  # fmt: skip
    assert {"set-cookie", "access-control-allow-origin", "x-ray"}.isdisjoint(answer.headers)
    assert "ray-token" not in str(answer.headers) + answer.text
    # what the cluster sends is data: opened as a page it runs nothing, and no other site reads it
    assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["x-content-type-options"] == "nosniff"
    mode = await viewer.get("/ray/api/authentication_mode")
    assert mode.json() == {"authentication_mode": "disabled"}


async def test_rays_page_and_its_scripts_are_the_services_own(
    api: ApiService, ray: TellingDashboard
) -> None:
    hostile = "<script>alert(1)</script>"
    ray.answers |= {"/": Response(hostile), "/static/js/main.js": Response(hostile)}
    viewer = await browser_of(api, "viewer")
    assert (await viewer.get("/ray")).headers["location"] == "/ray/"
    page = await viewer.get("/ray/")
    assert "Ray Dashboard" in page.text and hostile not in page.text
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    scripts = re.findall(r'(?:src|href)="(\./[^"]+)"', page.text)
    assert any(name.endswith(".js") for name in scripts)
    nobody = await api.client(None)
    for name in scripts:
        file = await nobody.get(f"/ray/{name.removeprefix('./')}")
        assert file.status_code == 200
        assert file.content == (rays_folder() / "client" / "build" / name).read_bytes()
    for name in ("static/js/none.js", "static/%2e%2e/index.html", "static/js/../../index.html"):
        assert (await nobody.get(f"/ray/{name}")).status_code in (401, 404)
    assert [asked[1] for asked in ray.asked] == ["/api/version"]


async def test_profiles_are_for_submitters_are_audited_and_come_from_this_site(
    api: ApiService, ray: TellingDashboard
) -> None:
    ray.answers["/worker/traceback"] = Response("<svg/>", media_type="image/svg+xml")
    viewer, submitter = await browser_of(api, "viewer"), await browser_of(api, "submitter")
    assert (await viewer.get(PROFILE, headers=SAME_SITE)).status_code == 403
    foreign = [
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
        {"Referer": "https://elsewhere.example/"},
        {"Referer": "http://["},
        {},  # a plain connection, whose browser does not say where the link was
    ]
    for headers in foreign:
        refused = await submitter.get(PROFILE, headers=headers)
        assert refused.status_code == 403 and "another site" in refused.text, headers
    assert ray.asked == []
    assert [entry.path for entry in await audited(api)] == ["/login"] * 2
    for headers in (SAME_SITE, {"Referer": f"{api.url}/ray/"}):
        answer = await submitter.get(PROFILE, headers=headers)
        assert (answer.status_code, answer.text) == (200, "<svg/>")
        assert answer.headers["content-security-policy"].startswith("sandbox allow-scripts;")
        assert "allow-same-origin" not in answer.headers["content-security-policy"]
    assert [path for _, path, _ in ray.asked] == [PROFILE.removeprefix("/ray")] * 2
    profiles = (await audited(api))[:2]
    assert [(entry.token_name, entry.path, entry.status) for entry in profiles] == [
        ("submitter of None", PROFILE, 200)
    ] * 2


async def audited(api: ApiService) -> list[AuditRow]:
    return await asyncio.to_thread(api.audit.page, 10)


async def test_other_sites_may_link_to_data_and_not_load_it(
    api: ApiService, ray: TellingDashboard
) -> None:
    viewer = await browser_of(api, "viewer")
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert (await viewer.get("/ray/api/jobs/", headers=link)).status_code == 200
    for headers in (
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
        {"Origin": "https://elsewhere.example"},
        {"Origin": "null"},
    ):
        refused = await viewer.get("/ray/api/jobs/", headers=headers)
        assert refused.status_code == 403, headers
    assert len(ray.asked) == 1


async def test_a_job_leads_to_its_run(api: ApiService, ray: TellingDashboard) -> None:
    run_id, _ = await api.running()
    job = {"submission_id": f"{run_id}-s001", "status": "RUNNING", "metadata": {"run_id": run_id}}
    ray.answers |= {
        "/api/jobs/02000000": JSONResponse(job),
        "/api/jobs/other": JSONResponse(job | {"metadata": {}}),
        "/api/jobs/gone": JSONResponse(job | {"metadata": {"run_id": "run_000000000000"}}),
        "/api/jobs/none": Response("Job none does not exist", 404),
    }
    viewer = await browser_of(api, "viewer")
    assert (await viewer.get("/ray-jobs/02000000")).headers["location"] == f"/runs/{run_id}"
    for job_id, said in (
        ("other", "does not belong"),
        ("gone", "does not exist"),
        ("none", "no job"),
    ):
        answer = await viewer.get(f"/ray-jobs/{job_id}")
        assert answer.status_code == 404 and said in answer.text


# ---------------------------------------------------------------- limits


async def test_an_answer_that_is_too_large_is_refused_or_cut(
    api: ApiService, ray: TellingDashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_dashboard, "MAX_BYTES", 1000)
    viewer = await browser_of(api, "viewer")
    ray.answers["/nodes"] = Response(b"x" * 1001)
    refused = await viewer.get("/ray/nodes")
    assert refused.status_code == 503 and "more than 1000" in refused.text
    ray.answers["/nodes"] = StreamingResponse(_pieces(b"x" * 600, 3))
    with pytest.raises(httpx.RemoteProtocolError):  # a client can tell that it is not all
        await viewer.get("/ray/nodes")
    ray.answers["/nodes"] = StreamingResponse(_pieces(b"x" * 500, 2))
    assert len((await viewer.get("/ray/nodes")).content) == 1000


async def _pieces(piece: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece


async def test_ray_that_is_away_slow_or_strange_is_a_clear_page(
    api: ApiService, ray: TellingDashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewer = await browser_of(api, "viewer")
    ray.token = "another"
    page = await viewer.get("/ray/")
    assert page.status_code == 503 and "refuses the token" in page.text
    assert "ray-token" not in page.text
    ray.token = "ray-token"
    never = asyncio.Event()

    async def hanging() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    ray.answers["/nodes"] = StreamingResponse(hanging())
    monkeypatch.setattr("service.annexes.ray_dashboard.pages.READ_TIMEOUT_S", 0.2)
    with pytest.raises(httpx.RemoteProtocolError):
        await viewer.get("/ray/nodes")
    never.set()
    ray.url = f"http://127.0.0.1:{free_port()}"
    for path in ("/ray/", "/ray/nodes", "/ray-jobs/x"):
        page = await viewer.get(path)
        assert page.status_code == 503 and page.headers["retry-after"] == "2"
        assert "does not answer" in page.text and "Runs continue" in page.text
