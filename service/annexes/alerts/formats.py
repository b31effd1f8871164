"""The form of a message for each receiver. Pure functions of an ``AlertMessage``.

Texts of runs and of user code are shown as they are: no receiver may read markup in them.
"""

from __future__ import annotations

from email.message import EmailMessage
from html import escape
from typing import Any, Final

from everstep.text.words import duration
from everstep.wire import format_time
from everstep.wire.alerts import AlertMessage

_SEVERITY: Final = {
    "failed": "critical",
    "stalled": "error",
    "recovered": "warning",
    "straggler": "warning",
    "finished": "info",
}
"""PagerDuty's severity of each condition."""
_MARK: Final = {"critical": "🔴", "error": "🔴", "warning": "🟠", "info": "🔵"}
_MARK_RESOLVED: Final = "🟢"
_CARD: Final = "application/vnd.microsoft.card.adaptive"


def title(message: AlertMessage) -> str:
    """Return what heads a message: ``Resolved: on-call (stalled)``."""
    begin = {"trigger": "", "resolve": "Resolved: ", "test": "Test: "}[message.event]
    return f"{begin}{message.alert} ({message.when})"


def _severity(message: AlertMessage) -> str:
    return "info" if message.event == "test" else _SEVERITY[message.when]


def _mark(message: AlertMessage) -> str:
    return _MARK_RESOLVED if message.event == "resolve" else _MARK[_severity(message)]


def lines(message: AlertMessage) -> list[tuple[str, str]]:
    """Return names and values, the most important first."""
    run, failure, cost = message.run, message.failure, message.cost
    steps = f" of {run.total_steps}" if run.total_steps else ""
    found: list[tuple[str, str | None]] = [
        ("Run", f"{run.name} ({run.id}, project {run.project})"),
        ("Status", f"{run.status.capitalize()} at step {run.step}{steps}"),
        ("Reason", run.reason),
    ]
    if failure is not None:
        rank = "" if failure.first_rank is None else f", rank {failure.first_rank} failed first"
        node = f" on node {failure.node_id}" if failure.node_id else ""
        cause = f": {failure.exception}" if failure.exception else ""
        found += [
            ("Last failure", f"{failure.verdict}{rank}{node}{cause}"),
            ("Drill", failure.drill),
            ("Its cost", _cost_of(failure.steps_lost, failure.recovery_s)),
        ]
        total = _cost_of(cost.steps_lost, cost.recovery_s)
        found.append(("All failures", f"restarts {cost.restarts}, {total}"))
    return [(name, value) for name, value in found if value]


def _cost_of(steps_lost: int | None, recovery_s: float | None) -> str:
    lost = "steps lost not known yet" if steps_lost is None else f"steps lost {steps_lost}"
    spent = "not training again yet" if recovery_s is None else f"recovery {duration(recovery_s)}"
    return f"{lost}, {spent}"


def slack(message: AlertMessage) -> dict[str, Any]:
    """Return the body for an incoming webhook of Slack: blocks of plain text, and the text of its
    notification."""
    text = f"{_mark(message)} {title(message)}"
    shown = "\n".join(f"{name}: {value}" for name, value in lines(message))
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": text[:150]}},
        {"type": "section", "text": {"type": "plain_text", "text": message.summary}},
        {"type": "section", "text": {"type": "plain_text", "text": shown[:2900]}},
    ]
    if message.run.url:
        button = {"type": "plain_text", "text": "Open the run"}
        element = {"type": "button", "text": button, "url": message.run.url}
        blocks.append({"type": "actions", "elements": [element]})
    # Slack finds no link and no mention in an escaped text.
    return {"text": escape(f"{text}: {message.summary}", quote=False), "blocks": blocks}


def teams(message: AlertMessage) -> dict[str, Any]:
    """Return the body for a workflow of Teams ("when a webhook request is received"): an adaptive
    card, whose text runs know no markup."""
    head = {"type": "TextRun", "text": f"{_mark(message)} {title(message)}"}
    body: list[dict[str, Any]] = [
        {"type": "RichTextBlock", "inlines": [{**head, "weight": "bolder", "size": "large"}]},
        {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": message.summary}]},
    ]
    for name, value in lines(message):
        runs = [
            {"type": "TextRun", "text": f"{name}: ", "weight": "bolder"},
            {"type": "TextRun", "text": value},
        ]
        body.append({"type": "RichTextBlock", "inlines": runs, "spacing": "small"})
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": body,
    }
    if message.run.url:
        card["actions"] = [
            {"type": "Action.OpenUrl", "title": "Open the run", "url": message.run.url}
        ]
    attachment = {"contentType": _CARD, "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [attachment]}


def pagerduty(message: AlertMessage, routing_key: str) -> dict[str, Any]:
    """Return the body for PagerDuty's Events API v2. A test is one event without an end."""
    action = "resolve" if message.event == "resolve" else "trigger"
    body: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": action,
        "dedup_key": message.incident[:255],
        "client": "Everstep",
    }
    if message.run.url:
        body["client_url"] = message.run.url
        body["links"] = [{"href": message.run.url, "text": "Open the run"}]
    if action == "resolve":
        return body
    node = message.failure.node_id if message.failure else None
    payload = {
        "summary": f"{title(message)}: {message.summary}"[:1024],
        "source": node or message.run.id,
        "severity": _severity(message),
        "timestamp": format_time(message.at),
        "component": message.run.name,
        "group": message.run.project,
        "class": message.failure.verdict if message.failure else message.when,
        "custom_details": message.model_dump(mode="json"),
    }
    return {**body, "payload": payload}


def email(message: AlertMessage, sender: str, recipients: list[str]) -> EmailMessage:
    """Return an e-mail in plain text. Messages of one incident are one thread."""
    mail = EmailMessage()
    mail["Subject"] = f"[Everstep] {title(message)}: {message.run.name}"
    mail["From"], mail["To"] = sender, ", ".join(recipients)
    mail["Date"] = message.at
    domain = sender.rpartition("@")[2].rstrip(">") or "everstep"
    mail["Message-ID"] = f"<{message.id}@{domain}>"
    mail["References"] = f"<{message.incident.replace('/', '.').replace(' ', '-')}@{domain}>"
    mail["Everstep-Delivery"] = message.id
    mail["Auto-Submitted"] = "auto-generated"
    width = max(len(name) for name, _ in lines(message)) + 2
    shown = [f"{name + ':':<{width}}{value}" for name, value in lines(message)]
    link = ["", message.run.url] if message.run.url else []
    mail.set_content("\n".join([message.summary, "", *shown, *link, ""]))
    return mail
