"""A service that is killed while a receiver has its message, and replicas of which one sends."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import postgres_server
from tests.support.api_service import spec
from tests.support.fake_ray import FakeRay, serving
from tests.support.replica import Replica
from tests.support.scripted_http import Handler, ScriptedServer, scripted
from tests.support.service_process import wait_for

PATIENCE_S = 120.0
NUM_RUNS = 6
LEADS = "this process reconciles now"


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


@pytest.mark.chaos
def test_of_two_replicas_one_sends_and_the_other_takes_over(shared: Path) -> None:
    programs = postgres_server.binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install -y postgresql")
    with ExitStack() as stack:
        server = stack.enter_context(postgres_server.running(programs))
        url = stack.enter_context(server.database())
        ray = stack.enter_context(serving(FakeRay()))
        receiver = stack.enter_context(scripted())
        receiver.script["/hook"] = [lambda handler: handler.send(200, b"")]
        replicas = [
            Replica(
                shared / f"home-{number}",
                shared / "storage",
                url,
                ray.url,
                environment(receiver),
            )
            for number in range(2)
        ]
        for replica in replicas:
            stack.callback(replica.kill)
        for replica in replicas:
            replica.wait_until_ready(PATIENCE_S)
        path = f"/v1/alerts/{watch(replicas[0], receiver)}/deliveries?limit=100"

        def num_delivered() -> int:
            items = ask(replicas[1], "GET", path)["items"]
            return sum(each["state"] == "delivered" for each in items)

        ended = [end_a_run(replicas[number % 2]) for number in range(NUM_RUNS)]
        wait_for(lambda: num_delivered() == NUM_RUNS, PATIENCE_S, "every message")
        leaders = [LEADS in (replica.home / "serve.log").read_text() for replica in replicas]
        leader = leaders.index(True)
        if sum(leaders) == 1:  # else a stalled machine has let the lease change hands
            assert len(receiver.to("/hook")) == NUM_RUNS, "one of the two sends"
        replicas[leader].kill()
        if leader == 1:
            replicas.reverse()
        ended += [end_a_run(replicas[1]) for _ in range(NUM_RUNS)]
        wait_for(lambda: num_delivered() == 2 * NUM_RUNS, PATIENCE_S, "the rest")
        requests = receiver.to("/hook")
        told = {each.headers["Everstep-Delivery"]: json.loads(each.body) for each in requests}
        assert sorted(body["run"]["id"] for body in told.values()) == sorted(ended)
