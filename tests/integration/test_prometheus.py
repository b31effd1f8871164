"""A real Prometheus scrapes the service; every alert and every panel is evaluated, and alerts fire
when they should."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from everstep.wire.events import EventKind
from tests.support.api_service import ApiService
from tests.unit.service.api.test_figures import a_hard_life

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "everstep.json"

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="Prometheus is not installed; apt-get install prometheus",
)


def panel_queries() -> Iterator[tuple[str, str]]:
    """(title, expression) of every target of the dashboard, with its variables filled in as Grafana
    does."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield (
                panel["title"],
                target["expr"].replace("$project", ".*").replace("$__rate_interval", "1m"),
            )


def alert_queries() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


class Prometheus:
    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=10, trust_env=False)

    async def __aenter__(self) -> Prometheus:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, path: str, **params: str) -> Any:
        answer = await self._http.get(f"/api/v1/{path}", params=params)
        assert answer.status_code == 200, (params, answer.text)
        return answer.json()["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.ask("query", query=expression))["result"]
        return found

    async def wait_for(self, expression: str) -> None:
        """Until the expression has an answer; the test's own deadline ends the waiting."""
        async with asyncio.timeout(40):
            while True:
                try:
                    ready = (await self._http.get("/-/ready")).status_code == 200
                    if ready and await self.query(expression):
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.2)


@pytest.fixture
async def prometheus(tmp_path: Path, api: ApiService) -> AsyncIterator[Prometheus]:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ALERTS)]
    [job] = config["scrape_configs"]
    (tmp_path / "viewer.token").write_text(api.token("viewer"))
    job["authorization"]["credentials_file"] = str(tmp_path / "viewer.token")
    job["static_configs"][0]["targets"] = [api.url.removeprefix("http://")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    process = await asyncio.create_subprocess_exec(*arguments)
    try:
        async with Prometheus(f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        process.terminate()
        await process.wait()


def test_rules_and_configuration_are_sound() -> None:
    for arguments in (
        ["rules", str(ALERTS)],
        ["config", "--syntax-only", str(DEPLOY / "prometheus" / "prometheus.yml")],
    ):
        checked = subprocess.run(
            ["promtool", "check", *arguments], capture_output=True, text=True, timeout=60
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


async def test_every_panel_and_alert_is_answered(api: ApiService, prometheus: Prometheus) -> None:
    run_id, journal = await api.running()
    run = api.runs.get(run_id)
    assert run is not None
    await api.create(name="waits")
    seen = api.figures
    seen.started(run, 3.0)
    await prometheus.wait_for('everstep_checkpoints_total{result="failed"} == 0')
    api.clock.now += 4000
    seen.applied(run, a_hard_life(journal))
    seen.applied(run, [journal.event(EventKind.STRAGGLER, slow=True, rank=0)])
    await prometheus.wait_for("delta(everstep_run_time_seconds[1m]) > 0")
    await prometheus.wait_for('increase(everstep_checkpoints_total{result="failed"}[1m]) > 0')

    known = set(await prometheus.ask("label/__name__/values"))
    for title, expression in (*panel_queries(), *alert_queries()):
        names = set(re.findall(r"\beverstep_\w+", expression))
        assert names <= known, f"{title} asks for {names - known}, which nobody tells"
        answer = await prometheus.query(expression)
        assert answer or title.startswith("Everstep"), f"{title} shows nothing: {expression}"

    await prometheus.wait_for('ALERTS{alertname="EverstepSavesFailing", alertstate="firing"}')
    await prometheus.wait_for('ALERTS{alertname="EverstepQueueStuck"}')
    rules = [rule for group in (await prometheus.ask("rules"))["groups"] for rule in group["rules"]]
    assert len(rules) == len(list(alert_queries()))
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
