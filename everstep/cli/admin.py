"""Commands of administrators: tokens, projects, the audit log, alerts."""

from __future__ import annotations

import itertools
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from everstep.cli.terminal import Exit, JsonOption, UrlOption, command, terminal
from everstep.errors import UsageError
from everstep.text import words
from everstep.wire.alerts import Alert, AlertDelivery
from everstep.wire.team import Project

project = typer.Typer(
    help="Create projects, set their quotas, list and delete them.", no_args_is_help=True
)
session = typer.Typer(help="List and end log-ins of browsers.", no_args_is_help=True)
token = typer.Typer(help="Create, list and revoke tokens.", no_args_is_help=True)

QuotaOption = Annotated[int | None, typer.Option(min=0, help="Default no limit.")]
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN_CALLS = 50


@project.command("create")
@command
def create_project(
    name: Annotated[str, typer.Argument(help="Name: lower-case letters, digits, - and _.")],
    max_workers: QuotaOption = None,
    max_running: QuotaOption = None,
    max_queued: QuotaOption = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Create a project, or replace the quotas of an existing one."""
    made = (
        terminal()
        .client()
        .projects.create(
            name, max_workers=max_workers, max_running=max_running, max_queued=max_queued
        )
    )
    if terminal().as_json:
        terminal().json(made)
    else:
        terminal().line(f"project {made.name}: {_quotas(made)}")


@project.command("list")
@command
def list_projects(json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show every project with its quotas and usage."""
    out = terminal()
    found = list(out.client().projects.list())
    if out.as_json:
        for one in found:
            out.json(one)
        return
    rows = [
        (one.name, one.usage.workers, one.usage.running, one.usage.queued, _quotas(one))
        for one in found
    ]
    headers = ("project", "workers", "running", "queued", "quotas")
    out.table(headers, rows, empty="no projects", text=("project", "quotas"))


@project.command("delete")
@command
def delete_project(name: str, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Delete a project that has neither runs nor tokens."""
    terminal().client().projects.delete(name)
    if not terminal().as_json:
        terminal().line(f"project {name} is deleted")


def _quotas(found: Project) -> str:
    given = [f"{name} {value}" for name, value in found.quotas if value is not None]
    return ", ".join(given) or "no limits"


@token.command("create")
@command
def create_token(
    name: Annotated[str, typer.Argument(help="Display name of the token.")],
    role: Annotated[str, typer.Option(help="viewer, submitter or admin.")] = "submitter",
    project_name: Annotated[
        str | None,
        typer.Option(
            "--project", metavar="NAME", help="The project that it can access; none for an admin."
        ),
    ] = None,
    create_project: Annotated[
        bool, typer.Option("--create-project", help="Create the project if it does not exist.")
    ] = False,
    all_projects: Annotated[
        bool,
        typer.Option(
            "--all-projects",
            help="For a viewer: read the runs of all projects, and Ray's dashboard.",
        ),
    ] = False,
    expires_in: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="For example 12h or 30d; default never."),
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Create a token. Its secret is shown only once."""
    out = terminal()
    expires_at = None if expires_in is None else datetime.now(UTC) + _duration(expires_in)
    # The service checks the role and lists the valid ones.
    made = out.client().tokens.create(
        name,
        role=role,  # type: ignore[arg-type]
        project=project_name,
        expires_at=expires_at,
        create_project=create_project,
        all_projects=all_projects,
    )
    if out.as_json:
        out.json(made)
        return
    if made.warning:
        out.note(f"warning: {made.warning}")
    out.note(
        f"{made.id}, a {made.role} of {made.project or 'every project'}; the secret is not shown "
        "again"
    )
    out.line(made.token)


@token.command("list")
@command
def list_tokens(json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show every token that is not revoked."""
    out = terminal()
    found = list(out.client().tokens.list())
    if out.as_json:
        for one in found:
            out.json(one)
        return
    rows = [
        (
            one.id,
            one.name,
            one.role,
            one.project or "all",
            one.expires_at or "never",
            words.ago(one.last_used_at) or "never",
        )
        for one in found
    ]
    headers = ("token", "name", "role", "project", "expires", "last used")
    text = ("name", "project", "expires", "last used")
    out.table(headers, rows, empty="no tokens", text=text, dispensable=("last used", "expires"))


@token.command("revoke")
@command
def revoke_token(token_id: str, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Revoke a token at once."""
    terminal().client().tokens.revoke(token_id)
    if not terminal().as_json:
        terminal().line(f"token {token_id} is revoked")


@session.command("list")
@command
def list_sessions(json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show your log-ins at the pages; an administrator sees everybody's."""
    out = terminal()
    found = list(out.client().sessions.list())
    if out.as_json:
        for one in found:
            out.json(one)
        return
    rows = [
        (
            one.id,
            one.name,
            one.role,
            one.project or "all",
            words.ago(one.created_at),
            one.expires_at,
            one.address or "unknown",
        )
        for one in found
    ]
    headers = ("session", "name", "role", "project", "began", "ends", "from")
    text = ("name", "project", "began", "ends", "from")
    out.table(headers, rows, empty="no sessions", text=text, dispensable=("began", "from"))


@session.command("revoke")
@command
def revoke_session(session_id: str, json_: JsonOption = False, url: UrlOption = None) -> None:
    """End a session at once."""
    terminal().client().sessions.revoke(session_id)
    if not terminal().as_json:
        terminal().line(f"session {session_id} has ended")


@command
def audit(
    token_id: Annotated[
        str | None, typer.Option("--token", metavar="ID", help="Only calls of this token.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of calls.")] = _SHOWN_CALLS,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Show the audit log: who changed what, newest first."""
    out = terminal()
    calls = out.client().audit.list(token_id=token_id)
    found = [call for _, call in zip(range(limit), calls, strict=False)]
    if out.as_json:
        for one in found:
            out.json(one)
        return
    rows = [
        (
            f"{one.at:%Y-%m-%d %H:%M:%S}",
            one.token_name,
            one.address,
            f"{one.method} {one.path}",
            one.target,
            one.status,
        )
        for one in found
    ]
    headers = ("at", "who", "from", "call", "target", "answer")
    out.table(headers, rows, empty="no calls", text=("who", "call"), dispensable=("from", "target"))


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a duration; use for example 30d, 12h or 5m")
    return timedelta(seconds=int(match[1]) * _UNIT_S[match[2]])


# ---------------------------------------------------------------- alerts

# Commands for administrators: `everstep alerts`.

alerts = typer.Typer(
    help="Send messages when runs of a project fail, finish, recover too often, have stragglers or "
    "stall.",
    no_args_is_help=True,
)

AlertArgument = Annotated[
    str, typer.Argument(metavar="ALERT", help="Id of the alert, such as alr_….")
]
ProjectOption = Annotated[
    str | None, typer.Option("--project", metavar="NAME", help="Only those of this project.")
]


@alerts.command("add")
@command
def add_alert(
    name: Annotated[str, typer.Argument(help="Display name, part of every message.")],
    when: Annotated[str, typer.Option(help="failed, finished, recovered, straggler or stalled.")],
    to: Annotated[str, typer.Option(help="slack, teams, pagerduty, email or json.")],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="URL",
            help="The receiver's URL; - reads it from standard input, so that no list of processes "
            "shows it.",
        ),
    ] = None,
    routing_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Key for pagerduty; - reads it from standard input."),
    ] = None,
    address: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME@HOST", help="Recipient of e-mails; may be repeated."),
    ] = None,
    project: Annotated[str, typer.Option(metavar="NAME", help="Project to watch.")] = "default",
    more_than: Annotated[
        int | None,
        typer.Option(metavar="N", help="With recovered: more than N times within an hour."),
    ] = None,
    stalled: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="With stalled: so long without a step."),
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Create an alert. Its URL and key are not shown again."""
    if target == "-" and routing_key == "-":
        raise UsageError("only one of --target and --routing-key can be -; give the other one")
    out = terminal()
    # The service checks the choices and lists the valid ones.
    made = out.client().alerts.create(
        name,
        when=when,  # type: ignore[arg-type]
        format=to,  # type: ignore[arg-type]
        project=project,
        url=_given(target),
        routing_key=_given(routing_key),
        addresses=address,
        more_than=more_than,
        stalled_s=stalled,
    )
    if out.as_json:
        out.json(made)
        return
    out.line(made.id)
    out.note(
        f"{_when(made)} to {made.format} ({made.target}); try it: everstep alerts test {made.id}"
    )


@alerts.command("list")
@command
def list_alerts(
    project: ProjectOption = None, json_: JsonOption = False, url: UrlOption = None
) -> None:
    """Show every alert, without secrets."""
    out = terminal()
    found = list(out.client().alerts.list(project))
    if out.as_json:
        for one in found:
            out.json(one)
        return
    rows = [(one.id, one.project, one.name, _when(one), one.format, one.target) for one in found]
    headers = ("alert", "project", "name", "when", "to", "target")
    text = ("project", "name", "when", "target")
    out.table(headers, rows, empty="no alerts", text=text, dispensable=("project", "target"))


@alerts.command("test")
@command
def test_alert(alert: AlertArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Send a test message, and show what became of it. Exit code 1 if it was not delivered."""
    out = terminal()
    sent = out.client().alerts.test(alert)
    if out.as_json:
        out.json(sent)
    elif sent.state == "delivered":
        out.line(f"delivered; the receiver answered {sent.status}")
    if sent.state != "delivered":
        raise out.fail(f"not delivered: {_problem(sent)}", Exit.FAILED)


@alerts.command("deliveries")
@command
def deliveries(
    alert: AlertArgument,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of messages.")] = 20,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Show the last messages of an alert, newest first, and what became of them."""
    out = terminal()
    found = list(itertools.islice(out.client().alerts.deliveries(alert), limit))
    if out.as_json:
        for one in found:
            out.json(one)
        return
    rows = [
        (
            one.id,
            f"{one.created_at:%Y-%m-%d %H:%M:%S}",
            one.event,
            one.state,
            one.tries,
            one.run_id,
            _problem(one) if one.error else one.status,
        )
        for one in found
    ]
    headers = ("message", "at", "event", "state", "tries", "run", "answer")
    out.table(
        headers, rows, empty="no messages", text=("answer",), dispensable=("tries", "run", "at")
    )


@alerts.command("retry")
@command
def retry(
    alert: AlertArgument,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="Such as dlv_….")],
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Send a message again. Failed tries are repeated for a day."""
    sent = terminal().client().alerts.retry(alert, message)
    if terminal().as_json:
        terminal().json(sent)
    else:
        terminal().line(f"message {sent.id} will be sent again")


@alerts.command("delete")
@command
def delete_alert(alert: AlertArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Delete an alert and its messages."""
    terminal().client().alerts.delete(alert)
    if not terminal().as_json:
        terminal().line(f"alert {alert} is deleted")


def _given(value: str | None) -> str | None:
    return sys.stdin.readline().strip() if value == "-" else value


def _when(alert: Alert) -> str:
    if alert.more_than is not None:
        return f"recovered more than {words.count(alert.more_than, 'time')} an hour"
    if alert.stalled_s is not None:
        return f"stalled for {words.duration(alert.stalled_s)}"
    return alert.when


def _problem(delivery: AlertDelivery) -> str:
    said = (delivery.answer or "").strip().splitlines()
    return f"{delivery.error}: {said[0]}" if said else str(delivery.error)
