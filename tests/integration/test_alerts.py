"""A service that is killed while a receiver has its message, replicas of which one sends, and URLs
that lead inside."""

from __future__ import annotations

import ctypes
import json
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api_service import spec
from tests.support.fake_ray import FakeRay, serving
from tests.support.name_server import NameServer
from tests.support.replica import Replica
from tests.support.scripted_http import Handler, ScriptedServer, scripted
from tests.support.service_process import wait_for

PATIENCE_S = 120.0


@pytest.fixture
def shared() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="everstep-alerts-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def ask(replica: Replica, method: str, path: str, body: Any = None) -> Any:
    answer = httpx.request(
        method,
        replica.url + path,
        json=body,
        headers=replica.headers,
        timeout=60,
        trust_env=False,
    )
    assert answer.is_success, answer.text
    return answer.json()


def watch(replica: Replica, receiver: ScriptedServer) -> str:
    """Make an alert of every end of a run; its id."""
    wanted = {"name": "ends", "when": "finished", "format": "json", "url": f"{receiver.url}/hook"}
    alert_id: str = ask(replica, "POST", "/v1/alerts", wanted)["id"]
    return alert_id


def end_a_run(replica: Replica) -> str:
    run_id: str = ask(replica, "POST", "/v1/runs", spec())["id"]
    ask(replica, "POST", f"/v1/runs/{run_id}/cancel")
    return run_id


def environment(receiver: ScriptedServer) -> dict[str, str]:
    return {"EVERSTEP_NOTIFY_ORIGINS": receiver.url, "EVERSTEP_NOTIFY_SECRET": "a long secret 123"}


def test_a_service_that_dies_while_it_sends_sends_again_with_the_same_id(shared: Path) -> None:
    arrived = threading.Event()

    def hold(handler: Handler) -> None:
        arrived.set()
        handler.server.released.wait(PATIENCE_S)

    with serving(FakeRay()) as ray, scripted() as receiver:
        receiver.script["/hook"] = [hold, lambda handler: handler.send(200, b"")]
        replica = Replica(
            shared / "home",
            shared / "storage",
            f"sqlite:///{shared / 'everstep.db'}",
            ray.url,
            environment(receiver),
        )
        try:
            replica.wait_until_ready(PATIENCE_S)
            alert_id = watch(replica, receiver)
            run_id = end_a_run(replica)
            assert arrived.wait(PATIENCE_S)
            replica.kill()
            receiver.released.set()
            replica.start()
            replica.wait_until_ready(PATIENCE_S)
            path = f"/v1/alerts/{alert_id}/deliveries"

            def delivered() -> bool:
                return bool(ask(replica, "GET", path)["items"][0]["state"] == "delivered")

            wait_for(delivered, PATIENCE_S, "the delivery after the restart")
            first, again = receiver.to("/hook")
            assert json.loads(first.body) == json.loads(again.body)
            assert json.loads(again.body)["run"]["id"] == run_id
            assert first.headers["Everstep-Delivery"] == again.headers["Everstep-Delivery"]
            [delivery] = ask(replica, "GET", path)["items"]
            assert (delivery["id"], delivery["status"], delivery["tries"]) == (
                again.headers["Everstep-Delivery"],
                200,
                1,
            )
        finally:
            replica.kill()


# ---------------------------------------------------------------- URLs that lead inside


OUTSIDE = "192.88.99.9"
"""A public address, which only this test's network has."""
_NEW_NETWORK, _NEW_MOUNTS, _OWN_DIRECTORY = 0x40000000, 0x00020000, 0x00000200


def in_a_network_of_its_own(names: Path, body: Callable[[], None]) -> None:
    """Run ``body``, and what it starts, with loopback and OUTSIDE as the only addresses, and a name
    server at 127.0.0.53. Skipped where nobody may make such a network."""
    problems: list[BaseException] = []

    def run() -> None:
        if ctypes.CDLL(None).unshare(_NEW_NETWORK | _NEW_MOUNTS | _OWN_DIRECTORY) != 0:
            problems.append(PermissionError())
            return
        resolver = names.with_name("resolv.conf")
        resolver.write_text("nameserver 127.0.0.53\n")
        try:
            for command in (
                ["mount", "--make-rprivate", "/"],
                ["mount", "--bind", str(resolver), "/etc/resolv.conf"],
                ["ip", "link", "set", "lo", "up"],
                ["ip", "address", "add", f"{OUTSIDE}/32", "dev", "lo"],
            ):
                subprocess.run(command, check=True)
            body()
        except BaseException as exc:
            problems.append(exc)

    # a thread has namespaces of its own, which end with it
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if problems and isinstance(problems[0], PermissionError):
        pytest.skip("needs the right to make a network namespace")
    if problems:
        raise problems[0]


class Rebinding(NameServer):
    """Each name is outside when it is asked for first, and inside from then on."""

    def answer(self, query: bytes) -> bytes:
        found = super().answer(query)
        if socket.inet_aton(OUTSIDE) in found:
            self._file.write_text("127.0.0.1 rebound.example inside.example\n")
        return found


class Door:
    """Counts who comes in."""

    def __init__(self, address: str, port: int = 0) -> None:
        self._listener = socket.create_server((address, port))
        self.port = int(self._listener.getsockname()[1])
        self.visits = 0
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        while True:
            visitor, _ = self._listener.accept()
            self.visits += 1
            visitor.close()


def test_no_url_of_an_alert_or_a_run_leads_the_service_inside(shared: Path) -> None:
    names = shared / "names"
    names.write_text(f"{OUTSIDE} rebound.example\n127.0.0.1 inside.example\n")
    in_a_network_of_its_own(names, lambda: knock(shared, names))


def knock(shared: Path, names: Path) -> None:
    inside = Door("127.0.0.1")
    outside = Door(OUTSIDE, inside.port)
    with (
        Rebinding(names, "127.0.0.53", 53),
        serving(FakeRay()) as ray,
        scripted() as receiver,
    ):
        location = f"http://127.0.0.1:{inside.port}/latest/meta-data"
        receiver.script["/away"] = [lambda each: each.send(307, b"", Location=location)]
        replica = Replica(
            shared / "home",
            shared / "storage",
            f"sqlite:///{shared / 'everstep.db'}",
            ray.url,
            {**environment(receiver), "HTTPS_PROXY": location, "HTTP_PROXY": location},
        )
        try:
            replica.wait_until_ready(PATIENCE_S)
            for host in ("127.0.0.1", "[::ffff:127.0.0.1]", "169.254.169.254", "[fd00:ec2::254]"):
                assert "not a public address" in refusal(replica, f"https://{host}:{inside.port}/")
            assert "not https" in refusal(replica, location)
            port = inside.port
            for url, error in {
                f"https://inside.example:{port}/": "is at 127.0.0.1, which is not a public",
                f"https://2130706433:{port}/": "is at 127.0.0.1, which is not a public",
                f"https://0x7f.1:{port}/": "is at 127.0.0.1, which is not a public",
                f"{receiver.url}/away": "answered 307",
                f"https://rebound.example:{port}/": "Error",
            }.items():
                assert error in str(tried(replica, url)), url
            assert outside.visits == 1, "the very address that was checked"
            answer = httpx.post(
                f"{replica.url}/v1/runs",
                json={**spec(), "notify": {"url": location}},
                headers=replica.headers,
                trust_env=False,
            )
            assert answer.status_code == 422 and "notify" in answer.text
            assert inside.visits == 0
        finally:
            replica.kill()


def refusal(replica: Replica, url: str) -> str:
    answer = httpx.post(
        f"{replica.url}/v1/alerts",
        json={"name": "ends", "when": "finished", "format": "json", "url": url},
        headers=replica.headers,
        trust_env=False,
    )
    assert answer.status_code == 422, answer.text
    return answer.text


def tried(replica: Replica, url: str) -> str | None:
    """Send a test message to a URL that can be entered; the error."""
    wanted = {"name": "ends", "when": "finished", "format": "json", "url": url}
    path = f"/v1/alerts/{ask(replica, 'POST', '/v1/alerts', wanted)['id']}"
    ask(replica, "POST", f"{path}/test")

    def error() -> str | None:
        found: str | None = ask(replica, "GET", f"{path}/deliveries")["items"][0]["error"]
        return found

    return wait_for(error, PATIENCE_S, f"the try to reach {url}")
