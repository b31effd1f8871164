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

from everstep.options.model import SettingsError
from everstep.spec.parsing import parse_spec
from everstep.wire import RunStatus
from service.db.audit import NotificationStore
from service.db.engine import Database
from service.db.events import EventStore
from service.db.runs import RunStore
from service.reconciler.webhook_sender import GIVE_UP_S, Notifier
from service.settings import Settings
from service.submission_rules.allowed import NOBODY, NotifyRule
from tests.support.api_service import ApiService, ManualClock, spec

pytest_plugins = ["tests.support.database_fixtures"]

SECRET = "a secret of some length"
RULE = NotifyRule(frozenset({"https://hooks.example.org", "http://10.0.0.1:9000"}), SECRET)
URL = "https://hooks.example.org/everstep?x=1"


class Receiver:
    """Answers with ``status`` and remembers what it was sent; not there where that is None."""

    def __init__(self) -> None:
        self.status: int | None = 200
        self.requests: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.status is None:
            raise httpx.ConnectError("nobody there")
        return httpx.Response(self.status, headers={"Location": "http://169.254.169.254/"})


@pytest.fixture
def ended_run(runs: RunStore) -> Callable[..., str]:
    """Make a run that ends cancelled; its id."""

    def make(**fields: object) -> str:
        run = runs.create(parse_spec(spec(**fields)), "tok_test")[0]
        runs.request_stop(run.id, "cancel")
        return run.id

    return make


def notifier(
    database: Database, clock: ManualClock, receiver: Receiver, rule: NotifyRule = RULE
) -> Notifier:
    stores = NotificationStore(database, clock), EventStore(database, clock)
    return Notifier(*stores, rule, clock, httpx.MockTransport(receiver))


async def test_an_end_is_told_once_and_signed(
    database: Database, clock: ManualClock, ended_run: Callable[..., str]
) -> None:
    run_id, receiver = ended_run(notify={"url": URL}), Receiver()
    ended_run(), ended_run(notify={"url": URL, "on": ["FAILED"]})
    for _ in range(2):
        await notifier(database, clock, receiver).work()
    [request] = receiver.requests
    body = json.loads(request.content)
    assert (body["run_id"], body["status"], body["reason"]["code"]) == (
        run_id,
        RunStatus.CANCELLED,
        "cancelled_by_user",
    )
    parts = dict(part.split("=") for part in request.headers["Everstep-Signature"].split(","))
    expected = hmac.new(
        SECRET.encode(), f"{parts['t']}.".encode() + request.content, hashlib.sha256
    ).hexdigest()
    assert (int(parts["t"]), parts["v1"]) == (int(clock.now), expected)
    assert (
        request.headers["Everstep-Delivery"] == f"{run_id}/{body['seq']}"
        and "Authorization" not in request.headers
    )


@pytest.mark.parametrize("status", [None, 302, 500])
async def test_it_is_tried_again_and_given_up_after_a_day(
    status: int | None, database: Database, clock: ManualClock, ended_run: Callable[..., str]
) -> None:
    ended_run(notify={"url": URL})
    receiver, store = Receiver(), NotificationStore(database, clock)
    receiver.status, began = status, clock.now
    while store.count():
        await notifier(database, clock, receiver).work()
        clock.now += 1000.0
        assert clock.now < began + GIVE_UP_S + 10_000
    assert clock.now > began + GIVE_UP_S and 20 < len(receiver.requests) < 60
    assert {request.url.host for request in receiver.requests} == {"hooks.example.org"}, (
        "redirects are not followed"
    )
    receiver.status = 200
    ended_run(notify={"url": URL})
    await notifier(database, clock, receiver).work()
    assert store.count() == 0


async def test_what_is_no_longer_allowed_is_not_called(
    database: Database, clock: ManualClock, ended_run: Callable[..., str]
) -> None:
    ended_run(notify={"url": URL})
    receiver = Receiver()
    await notifier(database, clock, receiver, NOBODY).work()
    assert receiver.requests == [] and NotificationStore(database, clock).count() == 0


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
        refused = await api.http.post("/v1/runs", json=spec(notify={"url": URL}))
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_spec")
        assert refused.json()["errors"][0]["loc"] == ["notify", "url"]
        archive = {"archive": f"sha256:{'0' * 64}", "task": "mine:Task"}
        wrong = {
            "name": "a",
            "notify": {"url": URL},
            "code": archive,
            "resume_from": {"run_id": "run_1"},
        }
        errors = (
            await api.http.post("/v1/runs", json=wrong | {"runtime_env": {"pip": ["einops"]}})
        ).json()["errors"]
        assert [".".join(error["loc"]) for error in errors] == [
            "runtime_env",
            "notify.url",
            "code.archive",
            "resume_from.run_id",
        ]
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
