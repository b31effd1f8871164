"""A service without one of its annexes: pages, OpenAPI and the command line stay whole."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Match

import service.annexes
from everstep.wire.events import EventKind
from service.annex import Annex
from service.annexes.nodes.store import NodeMarkStore
from service.annexes.registry import ANNEXES
from service.process.app import create_app
from tests.support.api_service import ApiService, Journal, spec
from tests.support.command_line import everstep
from tests.support.web_browser import Browser
from tests.unit.service.api.test_openapi_contract import described

COMMANDS = {
    "access": ("token", "list"),
    "drills": ("drill", "RUN", "kill_worker", "--no-wait"),
    "nodes": ("cordon", "node-1"),
    "alerts": ("alerts", "list"),
}
"""A command of each annex that serves some."""
_ADDRESS = re.compile(r'(?:href|src|hx-get|data-stream)="(/[^"#]*)')
_FORM = re.compile(r"<form([^>]*)>")


class World:
    """A service without ``missing``, whose database knows everything that a whole one does."""

    def __init__(self, api: ApiService, missing: Annex, run_id: str, ended_id: str) -> None:
        self.api = api
        self.missing = missing
        self.run_id = run_id
        """A run that trains."""
        self.ended_id = ended_id
        self.pages = (
            *("/login", "/runs", "/compare", "/queue", "/cluster", "/new", "/docs"),
            *(
                f"/runs/{each}{tail}"
                for each in (run_id, ended_id)
                for tail in ("", "/checkpoints", "/logs", "/events", "/spec")
            ),
        )


async def lived_in(directory: Path) -> tuple[str, str]:
    """Leave a database with rows of every annex; return a run that trains, and one that ended."""
    async with ApiService(directory, drills=True) as whole:
        run_id = await whole.create()
        whole.runs.claim_submission(run_id, 0)
        whole.runs.record_job(run_id, 1, f"{run_id}-s001")
        journal = Journal(at=whole.clock.now)
        whole.apply(run_id, [*journal.start(), journal.steps(1)])
        ended_id, other = await whole.running(name="ended")
        whole.apply(
            ended_id,
            [other.event(EventKind.FINISHED, outcome="succeeded", reason=None, step=1)],
        )
        NodeMarkStore(whole.database, whole.clock).mark("node-1", "cordoned", "ann")
        rule = {"name": "a", "when": "failed", "format": "slack", "url": "https://1.1.1.1/x"}
        for path, body in (
            ("/v1/alerts", {"project": "default"} | rule),
            (f"/v1/runs/{run_id}/profiles", {"rank": 0, "steps": 2}),
            (f"/v1/runs/{run_id}/stacks", {}),
            (f"/v1/runs/{run_id}/drills", {"kind": "kill_worker", "rank": 0}),
            ("/v1/projects", {"name": "vision", "quotas": {}}),
        ):
            answer = await whole.http.post(path, json=body)
            assert answer.is_success, answer.text
    return run_id, ended_id


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The files of such a service, and its two runs."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, *asyncio.run(lived_in(directory))


@pytest.fixture(params=ANNEXES, ids=lambda annex: annex.name)
async def world(
    request: pytest.FixtureRequest, template: tuple[Path, str, str], tmp_path: Path
) -> AsyncIterator[World]:
    directory, run_id, ended_id = template
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    rest = [annex for annex in ANNEXES if annex is not request.param]
    async with ApiService(tmp_path, drills=True, annexes=rest) as api:
        yield World(api, request.param, run_id, ended_id)


def test_every_folder_of_an_annex_is_in_the_list() -> None:
    [folder] = service.annexes.__path__
    found = {path.parent.name for path in Path(folder).glob("*/__init__.py")}
    assert found == {annex.name for annex in ANNEXES}


# ---------------------------------------------------------------- pages


def requests_of(page: str) -> Iterator[tuple[str, str]]:
    """Yield what a browser may ask from a page: method and path."""
    for address in _ADDRESS.findall(page):
        yield "GET", unescape(address)
    for form in _FORM.findall(page):
        method = re.search(r'method="(\w+)"', form)
        action = re.search(r'action="(/[^"]*)"', form)
        if action is not None:
            yield (method[1].upper() if method else "GET"), unescape(action[1])


def serves(routes: Any, method: str, path: str) -> bool:
    scope = {"type": "http", "method": method, "path": path.partition("?")[0], "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in routes)


async def test_every_page_of_the_core_answers_without_dead_links_or_buttons(world: World) -> None:
    app = create_app(world.api.context)
    mine = [route for router in world.missing.pages for route in router.routes]
    browser = await Browser.logged_in(world.api, world.api.token("admin"))
    asked: set[tuple[str, str]] = set()
    for path in world.pages:
        page = await browser.page(path)
        asked |= {request for request in requests_of(page) if request not in asked}
    assert ("POST", f"/runs/{world.run_id}/cancel") in asked and ("GET", "/queue") in asked
    for method, path in sorted(asked):
        assert not serves(mine, method, path), f"{method} {path} is the missing annex's"
        assert serves(app.router.routes, method, path), f"{method} {path} leads nowhere"
        if method == "GET" and not path.endswith("/stream"):
            answer = await browser.http.get(path, follow_redirects=True)
            assert answer.status_code in (200, 503 if path.startswith("/ray") else 200), path


async def test_the_same_pages_ask_the_annex_where_it_is(
    template: tuple[Path, str, str], tmp_path: Path
) -> None:
    """Else the test above would look at pages on which annexes have nothing."""
    directory, run_id, _ = template
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    async with ApiService(tmp_path, drills=True) as api:
        browser = await Browser.logged_in(api, api.token("admin"))
        asked: set[tuple[str, str]] = set()
        for path in ("/cluster", f"/runs/{run_id}"):
            asked |= set(requests_of(await browser.page(path)))
    for annex in ANNEXES:
        mine = [route for router in annex.pages for route in router.routes]
        assert not mine or any(serves(mine, *request) for request in asked), annex.name


# ---------------------------------------------------------------- api


async def test_openapi_has_all_but_the_annex_and_refers_to_nothing_that_is_not_there(
    world: World,
) -> None:
    own = {
        (method.lower(), route.path)
        for router in world.missing.routers
        for route in router.routes
        for method in route.methods  # type: ignore[attr-defined]
    }
    there, whole = await world.api.get("/openapi.json"), described()
    for path, methods in whole["paths"].items():
        kept = {method: each for method, each in methods.items() if (method, path) not in own}
        assert there["paths"].get(path, {}) == kept, path
    assert there["paths"].keys() <= whole["paths"].keys()
    schemas = there["components"]["schemas"]
    assert all(whole["components"]["schemas"][name] == each for name, each in schemas.items())
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(there)):
        assert name in schemas
    known = {
        each["operationId"] for methods in there["paths"].values() for each in methods.values()
    }
    for name in re.findall(r'"operationId": "([^"]+)", "parameters": {', json.dumps(there)):
        assert name in known


async def test_runs_are_served_as_before(world: World) -> None:
    run_id = await world.api.create(name="another")
    assert (await world.api.get(f"/v1/runs/{run_id}"))["status"] == "QUEUED"
    found = await world.api.http.post(f"/v1/runs/{run_id}/cancel")
    assert (found.status_code, found.json()["status"]) == (202, "CANCELLED")
    assert (await world.api.http.delete(f"/v1/runs/{run_id}")).status_code == 204
    replay = {"run_id": world.ended_id, "from_step": 0, "to_step": 1}
    refused = await world.api.http.post("/v1/validate", json=spec(replay=replay))
    assert refused.status_code == 422
    none = "this service has no replays; leave the field out"
    assert (none in refused.text) is (world.missing.name == "drills"), refused.text


async def test_a_link_to_ray_leads_where_ray_is(world: World) -> None:
    world.api.context.public_url = "https://everstep.example"
    links = (await world.api.get(f"/v1/runs/{world.run_id}"))["links"]
    is_missing = world.missing.name == "ray_dashboard"
    base = "http://ray.example:8265" if is_missing else "https://everstep.example/ray"
    assert links["ray_job"] == f"{base}/#/jobs/{world.run_id}-s001"


# ---------------------------------------------------------------- command line


async def test_a_command_of_the_annex_says_that_this_service_does_not_have_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.api.announce(monkeypatch)
    helped = await everstep("--help")
    assert helped.exit_code == 0
    for name, words in COMMANDS.items():
        assert words[0] in helped.stdout
        done = await everstep(*(word.replace("RUN", world.run_id) for word in words))
        if name == world.missing.name:
            assert done.exit_code == 2
            assert done.stderr.startswith("error: this service does not have /v1/")
            assert done.stderr.count("\n") == 1
        else:
            assert "does not have" not in done.stderr, (name, done.stderr)
    assert {"ray_dashboard"} == {annex.name for annex in ANNEXES} - COMMANDS.keys()
