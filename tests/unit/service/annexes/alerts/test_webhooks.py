"""Webhooks: told in the transaction of what happened, only to allowed origins, signed, and until
somebody takes them."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from everstep.options.model import SettingsError
from everstep.spec.parsing import parse_spec
from everstep.wire import RunStatus
from service.annexes.alerts.sender import AlertSender
from service.annexes.alerts.store import AlertStore
from service.db.engine import Database
from service.db.runs import RunStore
from service.settings import Settings
from service.submission_rules.allowed import NOBODY, NotifyRule
from tests.support.api_service import ApiService, ManualClock, spec

pytest_plugins = ["tests.support.database_fixtures"]

SECRET = "a secret of some length"
RULE = NotifyRule(frozenset({"https://hooks.example.org", "http://10.0.0.1:9000"}), SECRET)
URL = "https://hooks.example.org/everstep?x=1"


class Receiver:
    """Answers with ``status`` and remembers what it was sent."""

    def __init__(self) -> None:
        self.status = 200
        self.requests: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(self.status, headers={"Location": "http://169.254.169.254/"})


@pytest.fixture
def ended_run(runs: RunStore) -> Callable[..., str]:
    """Make a run that ends cancelled; its id."""

    def make(**fields: object) -> str:
        run = runs.create(parse_spec(spec(**fields)), "tok_test")[0]
        runs.request_stop(run.id, "cancel")
        return run.id

    return make


def sender(
    database: Database, clock: ManualClock, receiver: Receiver, rule: NotifyRule = RULE
) -> AlertSender:
    return AlertSender(database, rule, clock=clock, transport=httpx.MockTransport(receiver))


async def test_an_end_is_told_until_somebody_takes_it_and_signed(
    database: Database, clock: ManualClock, ended_run: Callable[..., str]
) -> None:
    run_id, receiver = ended_run(notify={"url": URL}), Receiver()
    ended_run(), ended_run(notify={"url": URL, "on": ["FAILED"]})
    RunStore(database).delete(run_id)
    receiver.status = 302
    for _ in range(3):
        await sender(database, clock, receiver).work()
        clock.now += 1.5
        receiver.status = 200
    first, request = receiver.requests
    assert (first.url, first.content) == (request.url, request.content), "the redirect is not taken"
    body = json.loads(request.content)
    assert (body["run_id"], body["status"]) == (run_id, RunStatus.CANCELLED)
    assert body["reason"]["code"] == "cancelled_by_user"
    parts = dict(part.split("=") for part in request.headers["Everstep-Signature"].split(","))
    expected = hmac.new(
        SECRET.encode(), f"{parts['t']}.".encode() + request.content, hashlib.sha256
    ).hexdigest()
    assert parts["v1"] == expected and abs(int(parts["t"]) - clock.now) < 5
    assert request.headers["Everstep-Delivery"] == f"{run_id}/{body['seq']}"
    assert "Authorization" not in request.headers
    assert AlertStore(database).deliveries(None, 9) == [], "its URL may be a secret of its run"


async def test_what_is_no_longer_allowed_is_not_called(
    database: Database, clock: ManualClock, ended_run: Callable[..., str]
) -> None:
    ended_run(notify={"url": "https://hooks.slack.com/public"})
    receiver = Receiver()
    await sender(database, clock, receiver).work()
    assert receiver.requests == []


async def test_what_0_1_0_has_not_delivered_is_sent_after_the_upgrade(
    old_database: Database, clock: ManualClock
) -> None:
    left = {"run_id": "run_1", "seq": 9, "url": URL, "created_at": clock.now - 60}
    left |= {"body": json.dumps({"run_id": "run_1", "status": "FAILED", "seq": 9})}
    left |= {"next_at": clock.now + 5, "num_tries": 3}
    columns = ", ".join(left)
    with old_database.write() as connection:
        values = ", ".join(f":{name}" for name in left)
        connection.execute(text(f"INSERT INTO notifications ({columns}) VALUES ({values})"), left)
    old_database.migrate()
    receiver = Receiver()
    for _ in range(3):
        await sender(old_database, clock, receiver).work()
        clock.now += 3
    [request] = receiver.requests
    assert json.loads(request.content).items() >= json.loads(str(left["body"])).items()
    assert request.headers["Everstep-Delivery"] == "run_1/9"


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        (URL, True),
        ("https://HOOKS.example.org:443/", True),
        ("http://10.0.0.1:9000/x", True),
        ("http://hooks.example.org/", False),
        ("https://hooks.example.org:8443/", False),
        ("https://hooks.example.org.evil.net/", False),
        ("https://hooks.example.org@evil.net/", False),
        ("http://10.0.0.1:9000@evil.net/", False),
        ("file:///etc/passwd", False),
        ("https://", False),
    ],
)
def test_an_origin_is_compared_as_a_whole(url: str, allowed: bool) -> None:
    assert RULE.allows(url) is allowed


async def test_a_spec_may_name_allowed_origins_only(tmp_path: Path) -> None:
    async with ApiService(tmp_path) as api:
        wrong = {
            "name": "a",
            "notify": {"url": URL},
            "code": {"archive": f"sha256:{'0' * 64}", "task": "mine:Task"},
            "resume_from": {"run_id": "run_1"},
            "runtime_env": {"pip": ["einops"]},
        }
        refused = await api.http.post("/v1/runs", json=wrong)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_spec")
        found = [".".join(error["loc"]) for error in refused.json()["errors"]]
        assert found == ["runtime_env", "code.archive", "notify.url", "resume_from.run_id"]
        api.set(notify=RULE)
        assert (await api.http.post("/v1/runs", json=spec(notify={"url": URL}))).status_code == 201


def test_what_an_operator_may_say() -> None:
    assert Settings.read({}).notify == NOBODY
    environ = {
        "EVERSTEP_NOTIFY_ORIGINS": "https://Hooks.example.org:443/, http://10.0.0.1:9000",
        "EVERSTEP_NOTIFY_SECRET": SECRET,
    }
    assert Settings.read(environ).notify == RULE
    for wrong in (
        {"EVERSTEP_NOTIFY_ORIGINS": "hooks.example.org"},
        {"EVERSTEP_NOTIFY_SECRET": "short"},
    ):
        with pytest.raises(SettingsError, match="EVERSTEP_NOTIFY"):
            Settings.read(environ | wrong)
