"""Commands of administrators: tokens, projects, the audit log, alerts."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from everstep.cli.terminal import Columns, Exit, Said, command, print_found, terminal
from everstep.errors import UsageError
from everstep.text import words
from everstep.wire.alerts import Alert, AlertDelivery
from everstep.wire.team import AuditEntry, NewToken, Project, Session, Token

project = typer.Typer(
    help="Create projects, set their quotas, list and delete them.", no_args_is_help=True
)
token = typer.Typer(help="Create, list and revoke tokens.", no_args_is_help=True)

QuotaOption = Annotated[int | None, typer.Option(min=0, help="Default no limit.")]
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN_CALLS = 50


def _quotas(found: Project) -> str:
    given = [f"{name} {value}" for name, value in found.quotas if value is not None]
    return ", ".join(given) or "no limits"


@project.command("create")
@command()
def create_project(
    name: Annotated[str, typer.Argument(help="Name: lower-case letters, digits, - and _.")],
    max_workers: QuotaOption = None,
    max_running: QuotaOption = None,
    max_queued: QuotaOption = None,
) -> Said:
    """Create a project, or replace the quotas of an existing one."""
    projects = terminal().client().projects
    made = projects.create(
        name, max_workers=max_workers, max_running=max_running, max_queued=max_queued
    )
    return Said(made, [f"project {made.name}: {_quotas(made)}"])


@project.command("list")
@command(
    Columns[Project](
        ("project", "workers", "running", "queued", "quotas"),
        lambda one: (
            one.name,
            one.usage.workers,
            one.usage.running,
            one.usage.queued,
            _quotas(one),
        ),
        empty="no projects",
        text=("project", "quotas"),
    )
)
def list_projects() -> Iterator[Project]:
    """Show every project with its quotas and usage."""
    return terminal().client().projects.list()


@project.command("delete")
@command()
def delete_project(name: str) -> Said:
    """Delete a project that has neither runs nor tokens."""
    terminal().client().projects.delete(name)
    return Said(lines=[f"project {name} is deleted"])


def _show_secret(made: NewToken) -> None:
    out = terminal()
    if made.warning:
        out.note(f"warning: {made.warning}")
    out.note(
        f"{made.id}, a {made.role} of {made.project or 'every project'}; the secret is not shown "
        "again"
    )
    out.line(made.token)


@token.command("create")
@command(_show_secret)
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
) -> NewToken:
    """Create a token. Its secret is shown only once."""
    expires_at = None if expires_in is None else datetime.now(UTC) + _duration(expires_in)
    # The service checks the role and lists the valid ones.
    tokens = terminal().client().tokens
    return tokens.create(
        name,
        role=role,  # type: ignore[arg-type]
        project=project_name,
        expires_at=expires_at,
        create_project=create_project,
        all_projects=all_projects,
    )


_TOKENS = Columns[Token](
    ("token", "name", "role", "project", "expires", "last used"),
    lambda one: (
        one.id,
        one.name,
        one.role,
        one.project or "all",
        one.expires_at or "never",
        words.ago(one.last_used_at) or "never",
    ),
    empty="no tokens",
    text=("name", "project", "expires", "last used"),
    dispensable=("last used", "expires"),
)


_SESSIONS = Columns[Session](
    ("session", "name", "role", "project", "began", "ends", "from"),
    lambda one: (
        one.id,
        one.name,
        one.role,
        one.project or "all",
        words.ago(one.created_at),
        one.expires_at,
        one.address or "unknown",
    ),
    empty="no sessions",
    text=("name", "project", "began", "ends", "from"),
    dispensable=("began", "from"),
)


@token.command("list")
@command()
def list_tokens(
    sessions: Annotated[
        bool,
        typer.Option(
            "--sessions",
            help="Show the log-ins of browsers: yours, or everybody's to an administrator.",
        ),
    ] = False,
) -> None:
    """Show every token that is not revoked."""
    client = terminal().client()
    if sessions:
        print_found(client.sessions.list(), _SESSIONS)
    else:
        print_found(client.tokens.list(), _TOKENS)


@token.command("revoke")
@command()
def revoke_token(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of a token, or of a session (ses_…).")
    ],
) -> Said:
    """Revoke a token at once, or end the log-in of a browser."""
    client = terminal().client()
    if token_id.startswith("ses_"):
        client.sessions.revoke(token_id)
        return Said(lines=[f"session {token_id} has ended"])
    client.tokens.revoke(token_id)
    return Said(lines=[f"token {token_id} is revoked"])


@command(
    Columns[AuditEntry](
        ("at", "who", "from", "call", "target", "answer"),
        lambda one: (
            f"{one.at:%Y-%m-%d %H:%M:%S}",
            one.token_name,
            one.address,
            f"{one.method} {one.path}",
            one.target,
            one.status,
        ),
        empty="no calls",
        text=("who", "call"),
        dispensable=("from", "target"),
    )
)
def audit(
    token_id: Annotated[
        str | None, typer.Option("--token", metavar="ID", help="Only calls of this token.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of calls.")] = _SHOWN_CALLS,
) -> Iterator[AuditEntry]:
    """Show the audit log: who changed what, newest first."""
    return itertools.islice(terminal().client().audit.list(token_id=token_id), limit)


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


@alerts.command("add")
@command()
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
) -> Said:
    """Create an alert. Its URL and key are not shown again."""
    if target == "-" and routing_key == "-":
        raise UsageError("only one of --target and --routing-key can be -; give the other one")
    # The service checks the choices and lists the valid ones.
    alerts = terminal().client().alerts
    made = alerts.create(
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
    what = f"{_when(made)} to {made.format} ({made.target})"
    return Said(made, [made.id], [f"{what}; try it: everstep alerts test {made.id}"])


_ALERTS = Columns[Alert](
    ("alert", "project", "name", "when", "to", "target"),
    lambda one: (one.id, one.project, one.name, _when(one), one.format, one.target),
    empty="no alerts",
    text=("project", "name", "when", "target"),
    dispensable=("project", "target"),
)


_DELIVERIES = Columns[AlertDelivery](
    ("message", "at", "event", "state", "tries", "run", "answer"),
    lambda one: (
        one.id,
        f"{one.created_at:%Y-%m-%d %H:%M:%S}",
        one.event,
        one.state,
        one.tries,
        one.run_id,
        _problem(one) if one.error else one.status,
    ),
    empty="no messages",
    text=("answer",),
    dispensable=("tries", "run", "at"),
)


@alerts.command("list")
@command()
def list_alerts(
    alert: Annotated[
        str | None,
        typer.Argument(
            metavar="[ALERT]",
            help="Show the last messages of this alert, and what became of them.",
            show_default=False,
        ),
    ] = None,
    project: ProjectOption = None,
    limit: Annotated[int, typer.Option(min=1, help="With ALERT: maximum number of messages.")] = 20,
) -> None:
    """Show every alert, without secrets, or the messages of one."""
    client = terminal().client().alerts
    if alert is None:
        print_found(client.list(project), _ALERTS)
    else:
        print_found(itertools.islice(client.deliveries(alert), limit), _DELIVERIES)


@alerts.command("test")
@command()
def test_alert(
    alert: AlertArgument,
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="[MESSAGE]",
            help="Send this one again, such as dlv_…. Failed tries are repeated for a day.",
            show_default=False,
        ),
    ] = None,
) -> Said:
    """Send a test message, and show what became of it. Exit code 1 if it was not delivered."""
    out = terminal()
    if message is not None:
        again = out.client().alerts.retry(alert, message)
        return Said(again, [f"message {again.id} will be sent again"])
    sent = out.client().alerts.test(alert)
    if sent.state != "delivered":
        if out.as_json:
            out.json(sent)
        raise out.fail(f"not delivered: {_problem(sent)}", Exit.FAILED)
    return Said(sent, [f"delivered; the receiver answered {sent.status}"])


@alerts.command("delete")
@command()
def delete_alert(alert: AlertArgument) -> Said:
    """Delete an alert and its messages."""
    terminal().client().alerts.delete(alert)
    return Said(lines=[f"alert {alert} is deleted"])
