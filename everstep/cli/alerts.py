"""Commands for administrators: `everstep alerts`."""

from __future__ import annotations

import itertools
import sys
from typing import Annotated

import typer

from everstep.cli.options import JsonOption, UrlOption
from everstep.cli.terminal import Exit, command, terminal
from everstep.errors import UsageError
from everstep.text import words
from everstep.wire.alerts import Alert, AlertDelivery

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
