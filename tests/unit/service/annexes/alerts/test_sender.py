"""From an event of a run to a receiver: a real HTTP server that fails and comes back, on both
databases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import select

from everstep.spec.parsing import parse_spec
from everstep.wire.alerts import AlertRequest
from everstep.wire.events import EventKind
from service.annexes.alerts.sender import AlertSender
from service.annexes.alerts.store import KEPT_S, RETRIES_LAST_S, AlertStore
from service.annexes.alerts.tables import AlertRow, alert_deliveries, alert_incidents
from service.db.engine import Database
from service.db.events import EventStore
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.submission_rules.allowed import NOBODY, NotifyRule
from tests.support.api_service import Journal, ManualClock, spec
from tests.support.scripted_http import Answer, ScriptedServer, scripted

pytest_plugins = ["tests.support.database_fixtures"]

SECRET = "a secret of some length"
DEATH = {"verdict": "worker_lost", "first_rank": 1, "node_id": "node-2", "step": 5}
DEATH |= {"exception": None, "action": "restart", "detect_s": 0.2}
BACK = {"detect_s": 0.2, "recovery_s": 1.5, "steps_lost": 2, "world_size_before": 2}
BACK |= {"world_size_after": 2, "phases": {}}


class World:
    """One project with one run that trains, a receiver, and a sender that tests step."""

    def __init__(self, database: Database, clock: ManualClock, receiver: ScriptedServer) -> None:
        self.database, self.clock, self.receiver = database, clock, receiver
        self.runs, self.events = RunStore(database, clock), EventStore(database, clock)
        self.alerts = AlertStore(database, clock)
        self.run_id = self.runs.create(parse_spec(spec()), "tok_test")[0].id
        self.runs.claim_submission(self.run_id, 0)
        self.runs.record_job(self.run_id, 1, f"{self.run_id}-s001")
        self.journal = Journal(at=clock.now)
        self.apply(*self.journal.start(), self.journal.steps(1))
        self.rule = NotifyRule(frozenset({receiver.url}), SECRET)
        self.answer_with(200)

    def answer_with(self, status: int, body: bytes = b"ok", **headers: str) -> None:
        answer: Answer = lambda handler: handler.send(status, body, **headers)  # noqa: E731
        self.receiver.script["/hook"] = [answer]

    def apply(self, *events: Any) -> None:
        self.events.apply_journal(self.run_id, 1, events, f"cursor-{events[-1].n}")

    def recover(self) -> None:
        """Fail and recover once."""
        self.apply(
            self.journal.event(EventKind.FAILURE, at=self.clock.now, **DEATH),
            self.journal.event(EventKind.ATTEMPT_ENDED, cause="worker_lost", last_step=5),
        )
        self.journal.attempt += 1
        self.apply(*self.journal.start(5), self.journal.event(EventKind.RECOVERED, **BACK))

    def alert(self, when: str, **fields: Any) -> AlertRow:
        given = {"name": "on-call", "format": "json", "url": f"{self.receiver.url}/hook"}
        wanted = AlertRequest.model_validate({**given, "when": when, **fields})
        return self.alerts.create(wanted, "tok_test")

    async def send(self, rule: NotifyRule | None = None) -> None:
        url = "https://everstep.example"
        await AlertSender(self.database, rule or self.rule, None, url, self.clock).work()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.body) for request in self.receiver.to("/hook")]

    def events_sent(self) -> list[str]:
        return [body["event"] for body in self.bodies]


@pytest.fixture
def world(database: Database, clock: ManualClock) -> Iterator[World]:
    with scripted() as receiver:
        yield World(database, clock, receiver)


async def test_a_failed_run_is_told_once_with_verdict_rank_node_cost_and_link(
    world: World,
) -> None:
    alert = world.alert("failed")
    world.alert("failed", project="default", name="elsewhere", url=f"{world.receiver.url}/other")
    world.recover()
    reason = {"code": "user_error", "message": "KeyError: 'a'"}
    last = {**DEATH, "verdict": "user_error", "exception": "KeyError: 'a'", "action": "stop"}
    world.apply(
        world.journal.event(EventKind.FAILURE, **last),
        world.journal.event(EventKind.FINISHED, outcome="failed", reason=reason, step=5),
    )
    for _ in range(3):
        await world.send()
    [body], [request] = world.bodies, world.receiver.to("/hook")
    assert (body["alert"], body["when"], body["event"]) == ("on-call", "failed", "trigger")
    assert body["run"]["url"] == f"https://everstep.example/runs/{world.run_id}"
    fault = body["failure"]
    assert (fault["verdict"], fault["first_rank"], fault["node_id"], fault["exception"]) == (
        "user_error",
        1,
        "node-2",
        "KeyError: 'a'",
    )
    assert body["cost"] == {"restarts": 1, "steps_lost": 2, "recovery_s": 1.5}
    assert "KeyError: 'a'" in body["summary"] and body["run"]["status"] == "FAILED"
    [delivery] = world.alerts.deliveries(alert.id, 10)
    assert request.headers["Everstep-Delivery"] == body["id"] == delivery.id
    assert request.headers["Everstep-Signature"].startswith(f"t={int(world.clock.now)},v1=")
    assert (delivery.state, delivery.status, delivery.num_tries) == ("delivered", 200, 1)
    assert len(world.receiver.to("/other")) == 1, "each alert has its own message"


async def test_a_receiver_that_fails_gets_it_when_it_is_back_and_in_order(world: World) -> None:
    alert = world.alert("straggler")
    slow = {"rank": 1, "node_id": "node-2", "step": 9, "own_s": 0.2, "peers_s": 0.1, "skew": 2.0}
    world.answer_with(503, b"down for a moment, /hook")
    world.apply(world.journal.event(EventKind.STRAGGLER, slow=True, **slow))
    await world.send()
    world.apply(world.journal.event(EventKind.STRAGGLER, slow=False, **slow))
    await world.send()
    assert world.events_sent() == ["trigger"], "not due again yet, and its end waits behind it"
    resolve, trigger = world.alerts.deliveries(alert.id, 10)
    assert (trigger.state, trigger.status, trigger.error) == ("waiting", 503, "it answered 503")
    assert trigger.answer == "down for a moment, [secret]" and resolve.num_tries == 0
    world.clock.now += 2.5
    world.answer_with(200)
    await world.send()
    await world.send()
    assert world.events_sent() == ["trigger", "trigger", "resolve"]
    first, again, end = world.bodies
    assert first["id"] == again["id"] != end["id"] and first["incident"] == end["incident"]
    assert "rank 1 on node node-2 slows its peers down" in first["summary"]


async def test_retries_back_off_heed_the_receiver_and_end_after_a_day(world: World) -> None:
    alert, began = world.alert("finished"), world.clock.now
    world.runs.request_stop(world.run_id, "cancel")
    world.apply(world.journal.event(EventKind.FINISHED, outcome="stopped", reason=None, step=5))
    world.answer_with(429, Retry_After="100")
    await world.send()
    [waiting] = world.alerts.deliveries(alert.id, 1)
    assert waiting.next_at == began + 100
    world.answer_with(302, Location=f"{world.receiver.url}/elsewhere")
    while world.alerts.deliveries(alert.id, 1)[0].state == "waiting":
        await world.send()
        world.clock.now += 1800.0
        assert world.clock.now < began + RETRIES_LAST_S + 9000
    assert world.receiver.to("/elsewhere") == [] and 20 < len(world.bodies) < 60
    [failed] = world.alerts.deliveries(alert.id, 1)
    assert (failed.state, failed.status, failed.error) == ("failed", 302, "it answered 302")
    world.answer_with(200)
    again = world.alerts.send_again(alert.id, failed.id)
    assert again is not None and again.id == failed.id
    await world.send()
    assert world.alerts.deliveries(alert.id, 1)[0].state == "delivered"
    world.clock.now += KEPT_S + 1
    await world.send()
    assert world.alerts.deliveries(alert.id, 1) == []


async def test_many_recoveries_within_an_hour_are_told_once_until_they_are_few(
    world: World,
) -> None:
    world.alert("recovered", more_than=2)
    for _ in range(2):
        world.recover()
    await world.send()
    assert world.bodies == []
    for _ in range(2):
        world.recover()
    await world.send()
    assert (
        world.events_sent() == ["trigger"]
        and "3 times within an hour" in (world.bodies[0]["summary"])
    )
    world.clock.now += 3601
    await world.send()
    await world.send()
    assert world.events_sent() == ["trigger", "resolve"]


async def test_a_run_that_makes_no_step_is_told_and_so_is_its_next_step(world: World) -> None:
    world.alert("stalled", stalled_s=600)
    world.clock.now += 599
    await world.send()
    assert world.bodies == []
    world.clock.now += 10
    for _ in range(2):
        await world.send()
        world.clock.now += 10
    assert world.events_sent() == ["trigger"] and "no step for 10 min" in world.bodies[0]["summary"]
    world.apply(world.journal.steps(2, at=world.clock.now))
    await world.send()
    assert world.events_sent() == ["trigger", "resolve"]


async def test_invalid_events_of_user_code_keep_neither_the_run_nor_its_alerts_from_the_end(
    world: World,
) -> None:
    world.alert("failed")
    world.alert("straggler")
    world.apply(
        world.journal.event(EventKind.STRAGGLER, rank="?"),
        world.journal.event(EventKind.FAILURE, verdict="bad luck"),
        world.journal.event(EventKind.DRILL_REQUESTED),
    )
    reason = {"code": "user_error", "message": "KeyError: 'a'"}
    world.apply(
        world.journal.event(EventKind.FINISHED, outcome="failed", reason=reason, step=1),
    )
    await world.send()
    [body] = world.bodies
    assert (body["run"]["status"], body["failure"]["verdict"]) == ("FAILED", "unknown")
    assert "KeyError: 'a'" in body["summary"]


async def test_what_leads_inside_is_not_called_and_the_way_out_is_said(world: World) -> None:
    alert = world.alert("finished")
    world.runs.request_stop(world.run_id, "cancel")
    world.apply(world.journal.event(EventKind.FINISHED, outcome="stopped", reason=None, step=5))
    await world.send(NOBODY)
    [delivery] = world.alerts.deliveries(alert.id, 1)
    assert world.bodies == [] and "EVERSTEP_NOTIFY_ORIGINS" in str(delivery.error)


@pytest.mark.parametrize("kind", ["slack", "teams", "pagerduty"])
async def test_other_formats_reach_their_receiver(world: World, kind: str) -> None:
    key = {"routing_key": SecretStr("R0UT1NGKEY")} if kind == "pagerduty" else {}
    alert = world.alert("finished", format=kind, **key)
    world.runs.request_stop(world.run_id, "cancel")
    world.apply(world.journal.event(EventKind.FINISHED, outcome="stopped", reason=None, step=5))
    secret = "R0UT1NGKEY" if kind == "pagerduty" else "/hook"
    world.answer_with(400, f"invalid: {secret}".encode())
    await world.send()
    [body], [delivery] = world.bodies, world.alerts.deliveries(alert.id, 1)
    assert {"slack": "blocks", "teams": "attachments", "pagerduty": "routing_key"}[kind] in body
    assert delivery.answer == "invalid: [secret]"
    assert secret not in f"{delivery.message}{alert!r}"


def test_what_belongs_to_a_rule_or_a_run_goes_with_it(world: World) -> None:
    gone = world.alert("straggler")
    kept = world.alert("straggler", name="kept")
    slow = {"rank": 1, "node_id": "node-2", "step": 9, "own_s": 0.2, "peers_s": 0.1, "skew": 2.0}
    world.apply(world.journal.event(EventKind.STRAGGLER, slow=True, **slow))
    assert world.alerts.delete(gone.id) and not world.alerts.delete(gone.id)
    with world.database.read() as connection:
        found = connection.execute(select(alert_incidents.c.alert_id)).scalars().all()
        sent = connection.execute(select(alert_deliveries.c.alert_id)).scalars().all()
    assert (found, sent) == ([kept.id], [kept.id])
    world.runs.request_stop(world.run_id, "cancel")
    world.apply(world.journal.event(EventKind.FINISHED, outcome="stopped", reason=None, step=5))
    world.runs.delete(world.run_id)
    with world.database.read() as connection:
        assert connection.execute(select(alert_incidents.c.alert_id)).all() == []
    assert [each.event for each in world.alerts.deliveries(kept.id, 5)] == ["resolve", "trigger"]
    assert ProjectStore(world.database).delete("default") and world.alerts.all() == []
