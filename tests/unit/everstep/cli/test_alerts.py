"""``everstep alerts`` as an administrator types it; the SDK is what it is made of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.annexes.alerts.sender import AlertSender
from service.submission_rules.allowed import NotifyRule
from tests.support.api_service import ApiService
from tests.support.command_line import everstep
from tests.support.scripted_http import scripted


@asynccontextmanager
async def sending(api: ApiService) -> AsyncIterator[None]:
    """A reconciler that sends, and does nothing else."""
    sender = AlertSender(api.database, api.settings.notify, clock=api.clock)

    async def send() -> None:
        while True:
            await sender.work()
            await asyncio.sleep(0.05)

    task = asyncio.create_task(send())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_alert_from_add_to_delete(api: ApiService) -> None:
    with scripted() as receiver:
        api.set(notify=NotifyRule(frozenset({receiver.url}), "s" * 16))
        receiver.script["/s3cr3t"] = [
            lambda handler: handler.send(404, b"no_service\nmore"),
            lambda handler: handler.send(200, b"ok"),
        ]
        add = ("alerts", "add", "on-call", "--when", "recovered", "--more-than", "1", "--to")
        made = await everstep(*add, "slack", "--target", "-", stdin=f"{receiver.url}/s3cr3t\n")
        assert made.exit_code == 0, made.stderr
        alert_id = made.stdout.strip()
        assert "recovered more than 1 time an hour to slack" in made.stderr
        assert "s3cr3t" not in made.stdout + made.stderr
        listed = (await everstep("alerts", "list")).stdout
        assert alert_id in listed and "on-call" in listed and "s3cr3t" not in listed
        assert (await everstep("alerts", "list", "--project", "other")).stdout == ""
        async with sending(api):
            tried = await everstep("alerts", "test", alert_id)
            assert tried.exit_code == 1 and "delivered; the" not in tried.stdout
            assert "not delivered: it answered 404: no_service" in tried.stderr
            tried = await everstep("alerts", "test", alert_id)
            assert (tried.exit_code, tried.stdout) == (0, "delivered; the receiver answered 200\n")
            found = (await everstep("alerts", "deliveries", alert_id, "--json")).stdout
            newest, oldest = map(json.loads, found.splitlines())
            assert (newest["state"], oldest["state"], oldest["event"]) == (
                "delivered",
                "failed",
                "test",
            )
            again = await everstep("alerts", "retry", alert_id, oldest["id"])
            assert again.exit_code == 0 and oldest["id"] in again.stdout
        shown = (await everstep("alerts", "deliveries", alert_id)).stdout
        assert newest["id"] in shown and "delivered" in shown
    assert (await everstep("alerts", "delete", alert_id)).exit_code == 0
    assert (await everstep("alerts", "delete", alert_id)).exit_code == 2


async def test_what_is_wrong_is_told_by_field(api: ApiService) -> None:
    add = ("alerts", "add", "a", "--when", "failed", "--to", "pagerduty")
    refused = await everstep(*add)
    assert refused.exit_code == 2 and "routing_key: is required for pagerduty" in refused.stderr
    both = await everstep(*add, "--target", "-", "--routing-key", "-")
    assert both.exit_code == 2 and "only one of" in both.stderr
