"""The proxy of the deployment: other programs behind it do not see Everstep's log-ins and
tokens."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.service_process import free_port, wait_for

CONFIGURATION = Path(__file__).parents[3] / "deploy" / "haproxy" / "haproxy.cfg"
FRONT = """
defaults
    mode http
    timeout connect 3s
    timeout client 10s
    timeout server 10s
frontend front
    bind 127.0.0.1:{port}
    default_backend {backend}
"""


class Telling(http.server.BaseHTTPRequestHandler):
    """Answers with the headers that it was sent."""

    def do_GET(self) -> None:
        headers = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(headers)))
        self.end_headers()
        self.wfile.write(headers)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def grafana(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Clients reach what stands for Grafana through the deployment's own rules for it."""
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if program is None:
        pytest.skip("HAProxy is not installed: apt-get install -y haproxy")
    upstream = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Telling)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    text = CONFIGURATION.read_text()
    rules = text[text.index("backend grafana\n") :].replace(
        "grafana:3000", f"127.0.0.1:{upstream.server_port}"
    )
    port = free_port()
    file = tmp_path_factory.mktemp("proxy") / "haproxy.cfg"
    file.write_text(FRONT.format(port=port, backend="grafana") + rules)
    process = subprocess.Popen([program, "-db", "-q", "-f", str(file)])
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=10
        ) as client:
            wait_for(lambda: answers(client), 30, "the proxy")
            yield client
    finally:
        process.terminate()
        process.wait(10)
        upstream.shutdown()
        upstream.server_close()


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/").is_success
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    ("cookie", "passed"),
    [
        ("grafana_session=g; __Host-everstep_session=secret; x=1", "grafana_session=g; x=1"),
        ("__Host-everstep_session=secret", ""),
        ("everstep_session=secret; everstep_theme=dark; grafana_session=g", "; grafana_session=g"),
        ("grafana_session=g;everstep_session=secret", "grafana_session=g"),
        (
            "grafana_session=g; my_everstep_session=mine",
            "grafana_session=g; my_everstep_session=mine",
        ),
    ],
)
def test_grafana_sees_its_own_cookies_only(grafana: httpx.Client, cookie: str, passed: str) -> None:
    assert grafana.get("/grafana/", headers={"Cookie": cookie}).json()["cookie"] == passed


def test_grafana_sees_no_token(grafana: httpx.Client) -> None:
    assert (
        "authorization"
        not in grafana.get("/", headers={"Authorization": "Bearer evs_secret"}).json()
    )
    assert (
        grafana.get("/", headers={"Authorization": "Basic Zzpn"}).json()["authorization"]
        == "Basic Zzpn"
    )


def test_several_headers_of_cookies_are_cleaned_together(grafana: httpx.Client) -> None:
    answer = grafana.get(
        "/",
        headers=[
            ("Cookie", "a=1; everstep_session=secret"),
            ("Cookie", "b=2; everstep_session=secret"),
        ],
    )
    assert "secret" not in answer.text
