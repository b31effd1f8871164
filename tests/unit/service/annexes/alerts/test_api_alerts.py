"""Rules of alerts over REST: who may, what is refused by name, and what is never shown again."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from service.submission_rules.allowed import NotifyRule
from tests.support.api_service import ApiService

URL = "https://hooks.slack.com/services/T0/B0/s3cr3tpath"
SLACK = {"name": "on-call", "when": "failed", "format": "slack", "url": URL}
DUTY = {"name": "night", "when": "recovered", "format": "pagerduty", "routing_key": "K3YK3YK3Y"}


async def test_a_rule_is_made_listed_tested_and_deleted_and_its_secrets_stay(
    api: ApiService,
) -> None:
    with capture_logs() as logs:
        made = await api.http.post("/v1/alerts", json=SLACK)
        night = await api.http.post("/v1/alerts", json=DUTY)
        assert (made.status_code, night.status_code) == (201, 201), made.text
        alert_id = made.json()["id"]
        assert made.json() | {"id": "", "created_at": ""} == {
            "id": "",
            "project": "default",
            "name": "on-call",
            "when": "failed",
            "more_than": None,
            "stalled_s": None,
            "format": "slack",
            "target": "hooks.slack.com",
            "created_at": "",
        }
        assert (night.json()["more_than"], night.json()["target"]) == (3, "events.pagerduty.com")
        listed = await api.get("/v1/alerts?project=default")
        assert {each["id"] for each in listed["items"]} == {alert_id, night.json()["id"]}
        assert (await api.get("/v1/alerts?project=vision"))["items"] == []
        tested = await api.http.post(f"/v1/alerts/{alert_id}/test")
        assert (tested.status_code, tested.json()["event"]) == (202, "test")
        deliveries = await api.get(f"/v1/alerts/{alert_id}/deliveries?limit=1")
        [delivery] = deliveries["items"]
        assert (delivery["state"], delivery["tries"], deliveries["next_cursor"]) == (
            "waiting",
            0,
            None,
        )
        retry = f"/v1/alerts/{alert_id}/deliveries/{delivery['id']}/retry"
        again = await api.http.post(retry)
        assert (again.status_code, again.json()["id"]) == (202, delivery["id"])
        audit = await api.get("/v1/audit")
        shown = f"{made.text}{night.text}{listed}{tested.text}{deliveries}{again.text}{audit}{logs}"
        assert "s3cr3tpath" not in shown and "K3YK3YK3Y" not in shown
        assert (await api.http.delete(f"/v1/alerts/{alert_id}")).status_code == 204
        for path in (f"/v1/alerts/{alert_id}/deliveries", retry):
            gone = await api.http.request("POST" if path == retry else "GET", path)
            assert (gone.status_code, gone.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"when": "sometimes"}, "when", "failed"),
        ({"more_than": 2}, "more_than", "has no effect with when failed"),
        ({"when": "stalled", "stalled_s": 1}, "stalled_s", "10"),
        ({"url": None}, "url", "is required for slack"),
        ({"url": "hooks.slack.com/x"}, "url", "is not a URL"),
        ({"url": "https://u:hidden@hooks.slack.com/x"}, "url", "without a user name"),
        ({"url": "http://hooks.slack.com/x"}, "url", "is not https"),
        ({"url": "https://169.254.169.254/latest"}, "url", "is not a public address"),
        ({"url": "https://localhost@evil/"}, "url", "is not a URL"),
        ({"routing_key": "ABCDEFGH"}, "routing_key", "has no effect with format slack"),
        ({"format": "pagerduty"}, "routing_key", "is required for pagerduty"),
        ({"format": "pagerduty", "routing_key": "hidden!!"}, "routing_key", "not an integration"),
        ({"format": "email"}, "url", "is not used by email"),
        ({"format": "email", "url": None}, "addresses", "at least one recipient"),
        ({"addresses": ["a@b"]}, "addresses", "has no effect with format slack"),
        (
            {"format": "email", "url": None, "addresses": ["a@b", "c\nd@e"]},
            "addresses",
            "NAME@HOST",
        ),
        ({"format": "email", "url": None, "addresses": ["a@b"]}, "format", "EVERSTEP_SMTP_URL"),
        ({"project": "nowhere"}, "project", "does not exist"),
        ({"nmae": "x"}, "nmae", "name"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    api: ApiService, change: dict[str, Any], field: str, words: str
) -> None:
    refused = await api.http.post("/v1/alerts", json={**SLACK, **change})
    assert refused.status_code == 422, refused.text
    found = {str(error["loc"][0]): error["msg"] for error in refused.json()["errors"]}
    assert words in found[field] and "hidden" not in refused.text
    assert (await api.get("/v1/alerts"))["items"] == []


async def test_what_the_operator_allows_may_be_called(api: ApiService) -> None:
    inside = {**SLACK, "format": "json", "url": "http://127.0.0.1:9000/x"}
    assert (await api.http.post("/v1/alerts", json=inside)).status_code == 422
    api.set(notify=NotifyRule(frozenset({"http://127.0.0.1:9000"}), "s" * 16))
    assert (await api.http.post("/v1/alerts", json=inside)).status_code == 201
