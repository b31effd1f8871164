"""Commands for administrators: `everstep project`, `everstep token`, `everstep session` and
`everstep audit`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from everstep.cli.options import JsonOption, UrlOption
from everstep.cli.terminal import command, terminal
from everstep.errors import UsageError
from everstep.text import words
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
