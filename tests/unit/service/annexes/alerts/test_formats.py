"""What each receiver gets: facts in its form, and no markup from a run's texts."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from everstep.wire import RunStatus, Verdict
from everstep.wire.alerts import AlertCost, AlertEvent, AlertFailure, AlertMessage, AlertRun
from service.annexes.alerts import formats

EVIL = "<!channel> *x* [click](https://evil.example) `y`"


def message(event: AlertEvent = "trigger", **fields: Any) -> AlertMessage:
    at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    run = AlertRun(
        id="run_1",
        name="digits",
        project="vision",
        status=RunStatus.FAILED,
        reason=EVIL,
        step=150,
        total_steps=500,
        url="https://everstep.example/runs/run_1",
    )
    failure = AlertFailure(
        at=at,
        verdict=Verdict.WORKER_LOST,
        first_rank=1,
        node_id="ab12",
        step=150,
        exception="KeyError: 'a'",
        action="restart",
        drill="drill kill_worker by ada",
        steps_lost=3,
        detect_s=0.2,
        recovery_s=1.2,
    )
    known: dict[str, Any] = {
        "id": "dlv_1",
        "alert": "on-call",
        "alert_id": "alr_1",
        "when": "failed",
        "event": event,
        "incident": "alr_1/run_1/run",
        "at": at,
        "summary": f"digits has failed at step 150: {EVIL}",
        "run": run,
        "failure": failure,
        "cost": AlertCost(restarts=2, steps_lost=3, recovery_s=2.5),
    }
    return AlertMessage(**{**known, **fields})


WANTED = (
    "worker_lost",
    "rank 1 failed first",
    "node ab12",
    "KeyError: 'a'",
    "drill kill_worker by ada",
    "steps lost 3",
    "recovery 1.2 s",
    "restarts 2",
    "step 150 of 500",
)


def _texts(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(map(_texts, value.values()))
    if isinstance(value, list):
        return "\n".join(map(_texts, value))
    return str(value)


@pytest.mark.parametrize("make", [formats.slack, formats.teams])
def test_a_chat_shows_verdict_rank_node_cost_and_link(make: Any) -> None:
    body = make(message())
    text = _texts(body)
    assert [
        each for each in (*WANTED, "https://everstep.example/runs/run_1") if each not in text
    ] == []
    assert "https://everstep.example/runs/run_1" not in _texts(make(message(run=_unlinked())))


def _unlinked() -> AlertRun:
    return message().run.model_copy(update={"url": None})


def test_slack_reads_no_markup_of_a_run() -> None:
    blocks = formats.slack(message())["blocks"]
    kinds = {part["text"]["type"] for part in blocks if "text" in part}
    assert kinds == {"plain_text"}
    assert "<!channel>" not in formats.slack(message())["text"]
    assert max(len(part["text"]["text"]) for part in blocks if "text" in part) <= 3000


def test_teams_gets_an_adaptive_card_of_text_runs() -> None:
    [attachment] = formats.teams(message())["attachments"]
    card = attachment["content"]
    assert (card["type"], card["version"]) == ("AdaptiveCard", "1.4")
    assert {block["type"] for block in card["body"]} == {"RichTextBlock"}, "which reads no Markdown"
    assert card["actions"][0]["type"] == "Action.OpenUrl"


def test_pagerduty_ends_what_it_began() -> None:
    begun = formats.pagerduty(message(), "KEY")
    ended = formats.pagerduty(message("resolve"), "KEY")
    assert begun["event_action"] == "trigger" and ended["event_action"] == "resolve"
    assert begun["dedup_key"] == ended["dedup_key"] == "alr_1/run_1/run"
    payload = begun["payload"]
    assert (payload["severity"], payload["source"], payload["class"]) == (
        "critical",
        "ab12",
        "worker_lost",
    )
    assert payload["custom_details"]["cost"]["steps_lost"] == 3 and "payload" not in ended
    assert payload["timestamp"] == "2026-03-01T12:00:00.000Z" and len(payload["summary"]) <= 1024
    assert formats.pagerduty(message("test"), "KEY")["payload"]["severity"] == "info"
    assert "KEY" not in json.dumps(payload)


def test_an_email_is_plain_text_in_one_thread() -> None:
    mail = formats.email(message(), "everstep@example.org", ["a@example.org", "b@example.org"])
    text = mail.get_content()
    assert [each for each in WANTED if each not in text] == []
    assert (mail["To"], mail["Message-ID"]) == (
        "a@example.org, b@example.org",
        "<dlv_1@example.org>",
    )
    other = formats.email(message("resolve", id="dlv_2"), "everstep@example.org", ["a@example.org"])
    assert mail["References"] == other["References"] and other["Subject"].startswith(
        "[Everstep] Resolved: on-call"
    )
    assert mail.get_content_type() == "text/plain"


def test_what_is_not_known_is_said() -> None:
    fault = message().failure
    assert fault is not None
    fault = fault.model_copy(update={"steps_lost": None, "recovery_s": None, "first_rank": None})
    text = _texts(formats.slack(message(failure=fault)))
    assert (
        "steps lost not known yet, not training again yet" in text
        and "rank" not in text.replace("restarts", "")
    )
    assert "Last failure" not in _texts(formats.slack(message(failure=None)))
