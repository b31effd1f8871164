"""Commands about services elsewhere: `everstep login`, `everstep logout`, `everstep context`."""

from __future__ import annotations

import sys
from typing import Annotated
from urllib.parse import urlsplit

import typer

from everstep.cli.terminal import JsonOption, UrlOption, command, terminal
from everstep.client.address import (
    LogIn,
    checked_token,
    checked_url,
    is_loopback,
    read_contexts,
    write_contexts,
)
from everstep.client.client import Client

LOCAL = "local"
"""Name of the service on this machine, which needs no log-in."""


@command
def login(
    service: Annotated[str, typer.Argument(metavar="URL", help="URL of the service.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the log-in; default the host.")
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Log in to a service: keep its URL and your token for the following commands and the SDK.

    The token is asked for, or read as one line of standard input.
    """
    out = terminal()
    address = checked_url(service)
    chosen = name or urlsplit(address).netloc
    if address.startswith("http://") and not is_loopback(address):
        out.note("warning: without https the token travels in the clear")
    if sys.stdin.isatty():
        token = typer.prompt("Token", hide_input=True, err=True)
    else:
        token = sys.stdin.readline()
    token = checked_token(token, "the given token")
    with Client(address, token, max_tries=2) as client:
        next(iter(client.runs.list()), None)  # raises AuthError for a token that is not valid
    path = write_contexts(read_contexts().with_log_in(chosen, LogIn(address, token)))
    if out.as_json:
        out.json({"name": chosen, "url": address})
    else:
        out.line(f"logged in to {address} as {chosen}")
        out.note(f"the token is in {path}, which only you can read")


@command
def logout(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Name of the log-in; default the one in use."),
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Forget a log-in on this machine. The token itself stays valid; `everstep token revoke` ends
    it."""
    known = read_contexts()
    chosen = name or known.current
    if chosen is None:
        terminal().note("not logged in")
        return
    write_contexts(known.without(chosen))
    if terminal().as_json:
        terminal().json({"name": chosen})
    else:
        terminal().line(f"forgot {chosen}")


@command
def context(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help=f"Log-in to use from now on; {LOCAL} for this machine's service."
        ),
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """List the log-ins, or use another one."""
    out, known = terminal(), read_contexts()
    if name is not None:
        known = known.using(None if name == LOCAL else name)
        write_contexts(known)
    if out.as_json:
        log_ins = {key: each.url for key, each in known.log_ins.items()}
        out.json({"current": known.current, "log_ins": log_ins})
        return
    rows = [
        ("*" if key == known.current else "", key, each.url) for key, each in known.log_ins.items()
    ]
    here = ("*" if known.current is None else "", LOCAL, "the service on this machine")
    out.table(("", "name", "url"), [here, *rows], empty="", text=("name", "url"))
