"""The proxy of the deployment, whole: TLS for our clients, and names asked for again."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from everstep import Client, Unavailable, UsageError
from tests.support.name_server import NameServer
from tests.support.service_process import free_port, wait_for

DEPLOY = Path(__file__).parents[3] / "deploy"
PORT = 8000
"""Of a replica, and of what stands for Grafana: the same at each of its addresses."""


class Named(http.server.BaseHTTPRequestHandler):
    """Answers with the address that it was asked at."""

    def do_GET(self) -> None:
        body = (
            b'{"status": "alive"}'
            if self.path == "/healthz"
            else str(self.server.server_address[0]).encode()
        )
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def upstream(address: str, port: int) -> Iterator[None]:
    """A container that answers at an address."""
    server = http.server.ThreadingHTTPServer((address, port), Named)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class Proxy:
    """HAProxy with the deployment's configuration; only ports and places are this test's."""

    def __init__(self, base: Path) -> None:
        program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
        if program is None:
            pytest.skip("HAProxy is not installed: apt-get install -y haproxy")
        self.port, self.upstream_port = free_port(), free_port()
        self.names, self.certificate = base / "hosts", base / "secrets" / "tls_certificate"
        self.names.write_text("")
        subprocess.run([DEPLOY / "secrets.sh", self.certificate.parent], check=True)
        text = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
        self._server = NameServer(self.names)
        changes = {
            "127.0.0.11:53": f"127.0.0.1:{self._server.port}",
            "bind :8443": f"bind 127.0.0.1:{self.port}",
            "/run/secrets/tls_certificate": str(self.certificate),
            **{
                f"{name}:{port}": f"{name}:{self.upstream_port}"
                for name, port in (("service-a", 8000), ("service-b", 8000), ("grafana", 3000))
            },
        }
        for found, put in changes.items():
            assert found in text
            text = text.replace(found, put)
        self._file = base / "haproxy.cfg"
        self._file.write_text(text)
        self._argv = [program, "-db", "-q", "-f", str(self._file)]

    @contextmanager
    def running(self) -> Iterator[Proxy]:
        with self._server:
            process = subprocess.Popen(self._argv)
            try:
                wait_for(lambda: self.answers(), 30, "the proxy")
                yield self
            finally:
                process.terminate()
                process.wait(10)

    def get(self, path: str) -> httpx.Response:
        trusted = ssl.create_default_context(cafile=str(self.certificate))
        return httpx.get(
            f"https://localhost:{self.port}{path}", verify=trusted, trust_env=False, timeout=10
        )

    def answers(self) -> bool:
        try:
            return self.get("/").status_code in (200, 503)
        except httpx.TransportError:
            return False

    def tell(self, **addresses: str) -> None:
        """What the engine's name server says from now on."""
        lines = [f"{address} {name.replace('_', '-')}\n" for name, address in addresses.items()]
        new = self.names.with_suffix(".new")
        new.write_text("".join(lines))
        new.replace(self.names)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    with Proxy(tmp_path).running() as proxy:
        yield proxy


def arrives_at(proxy: Proxy, path: str, address: str) -> bool:
    answer = proxy.get(path)
    return answer.status_code == 200 and answer.text == address


@pytest.mark.parametrize(("path", "name"), [("/x", "service_a"), ("/grafana/", "grafana")])
def test_a_part_that_is_made_again_at_another_address_is_found(
    proxy: Proxy, path: str, name: str
) -> None:
    with ExitStack() as first:
        first.enter_context(upstream("127.0.0.2", proxy.upstream_port))
        proxy.tell(**{name: "127.0.0.2"})
        wait_for(lambda: arrives_at(proxy, path, "127.0.0.2"), 30, f"{name} at its first address")
    with upstream("127.0.0.3", proxy.upstream_port):
        proxy.tell(**{name: "127.0.0.3"})
        wait_for(lambda: arrives_at(proxy, path, "127.0.0.3"), 30, f"{name} at another address")


def test_the_client_trusts_the_certificate_that_the_environment_names(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with upstream("127.0.0.2", proxy.upstream_port):
        proxy.tell(service_a="127.0.0.2")
        wait_for(lambda: arrives_at(proxy, "/x", "127.0.0.2"), 30, "the service")
        url = f"https://localhost:{proxy.port}"
        with (
            Client(url, "secret", max_tries=1) as stranger,
            pytest.raises(Unavailable, match=r"(?i)certificate"),
        ):
            stranger.health()
        monkeypatch.setenv("SSL_CERT_FILE", str(proxy.certificate))
        with Client(url, "secret") as client:
            assert client.health()


def test_a_certificate_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    with pytest.raises(UsageError, match=r"SSL_CERT_FILE.*/nowhere/ca.pem"):
        Client("https://localhost:8443", "secret")
    Client("http://localhost:8000", "secret").close()  # which needs no certificate
