"""The proxy of the deployment: other programs behind it do not see Everstep's log-ins and
tokens."""

from __future__ import annotations

import http.client
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    bind 127.0.0.1:PORT
    default_backend BACKEND
"""


class Telling(http.server.BaseHTTPRequestHandler):
    """Answers with the headers that it was sent, after as many seconds as ``X-Wait`` says."""

    def do_GET(self) -> None:
        time.sleep(float(self.headers.get("X-Wait", 0)))
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
    text = CONFIGURATION.read_text()
    rules = text[text.index("backend grafana\n") :]
    with proxied(tmp_path_factory, FRONT, rules, "grafana:3000") as client:
        yield client


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Clients reach what stands for a replica through the deployment's own rules for requests."""
    text = CONFIGURATION.read_text()
    rules = text[text.index("\nbackend everstep\n") : text.index("backend grafana\n")]
    front = FRONT.replace("timeout server 10s", "timeout server 1s")
    [refused] = re.findall(r"\n( *http-request deny [^\n]*\n)", text)
    front = front.replace("    default_backend", f"{refused}    default_backend")
    with proxied(tmp_path_factory, front, rules, r"service-[ab]:8000") as client:
        yield client


@contextmanager
def proxied(
    tmp_path_factory: pytest.TempPathFactory, front: str, backend: str, server: str
) -> Iterator[httpx.Client]:
    """A client of HAProxy, whose ``server``, a pattern, is one that tells what it was sent."""
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if program is None:
        pytest.skip("HAProxy is not installed: apt-get install -y haproxy")
    upstream = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Telling)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    backend = re.sub(server, f"127.0.0.1:{upstream.server_port}", backend)
    port = free_port()
    file = tmp_path_factory.mktemp("proxy") / "haproxy.cfg"
    name = backend.split()[1]
    file.write_text(front.replace("PORT", str(port)).replace("BACKEND", name) + backend)
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


def test_a_flame_graph_may_take_its_time(service: httpx.Client) -> None:
    slow = {"X-Wait": "2"}
    assert service.get("/ray/worker/cpu_profile", headers=slow).status_code == 200
    assert service.get("/runs", headers=slow).status_code == 504


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/metrics", 404),
        ("/%6detrics", 404),  # a replica decodes it
        ("/metric%73", 404),
        ("/%6D%65trics?x=1", 404),
        ("/metrics/", 404),
        ("/METRICS", 404),
        ("/v1/runs/run_x/metrics", 200),
        ("/metrics.html", 200),
        ("/%256detrics", 200),  # of another page, whatever it is
    ],
)
def test_metrics_are_for_the_inside_however_their_path_is_written(
    service: httpx.Client, path: str, status: int
) -> None:
    connection = http.client.HTTPConnection(service.base_url.host, service.base_url.port)
    try:
        connection.request("GET", path)  # httpx would write the path in its own way
        assert connection.getresponse().status == status
    finally:
        connection.close()


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
