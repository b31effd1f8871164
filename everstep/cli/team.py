"""Commands for administrators: `everstep project`, `everstep token`, `everstep audit`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from everstep.cli.terminal import JsonOption, UrlOption, command, terminal
from everstep.errors import UsageError
from everstep.text import words
from everstep.wire.team import Project

project = typer.Typer(
    help="Make projects, set their quotas, list and delete them.", no_args_is_help=True
)
token = typer.Typer(help="Make, list and revoke tokens.", no_args_is_help=True)

QuotaOption = Annotated[int | None, typer.Option(min=0, help="No limit where it is left out.")]
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN_CALLS = 50


@project.command("create")
@command
def create_project(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits, - and _.")],
    max_workers: QuotaOption = None,
    max_running: QuotaOption = None,
    max_queued: QuotaOption = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Make a project, or give one that is there these quotas in place of its own."""
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
    """Show every project with its quotas and what it uses."""
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
    out.table(("project", "workers", "running", "queued", "quotas"), rows, empty="no projects")


@project.command("delete")
@command
def delete_project(name: str, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Forget a project that has neither runs nor tokens."""
    terminal().client().projects.delete(name)
    if not terminal().as_json:
        terminal().line(f"project {name} is deleted")


def _quotas(found: Project) -> str:
    given = [f"{name} {value}" for name, value in found.quotas if value is not None]
    return ", ".join(given) or "no limits"


@token.command("create")
@command
def create_token(
    name: Annotated[str, typer.Argument(help="What people call it.")],
    role: Annotated[str, typer.Option(help="viewer, submitter or admin.")] = "submitter",
    project_name: Annotated[
        str | None,
        typer.Option(
            "--project", metavar="NAME", help="The one project that it reaches; none for an admin."
        ),
    ] = None,
    create_project: Annotated[
        bool, typer.Option("--create-project", help="Make the project where it does not exist.")
    ] = False,
    expires_in: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="For example 12h or 30d; never where left out."),
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Make a token; its secret is shown now and never again."""
    out = terminal()
    expires_at = None if expires_in is None else datetime.now(UTC) + _duration(expires_in)
    # The service judges the role, and says which there are.
    made = out.client().tokens.create(
        name,
        role=role,  # type: ignore[arg-type]
        project=project_name,
        expires_at=expires_at,
        create_project=create_project,
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
    out.table(("token", "name", "role", "project", "expires", "last used"), rows, empty="no tokens")


@token.command("revoke")
@command
def revoke_token(token_id: str, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Make a token worthless from now on."""
    terminal().client().tokens.revoke(token_id)
    if not terminal().as_json:
        terminal().line(f"token {token_id} is revoked")


@command
def audit(
    token_id: Annotated[
        str | None, typer.Option("--token", metavar="ID", help="Calls of this token only.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most calls to show.")] = _SHOWN_CALLS,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Show who changed what, newest first."""
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
    out.table(("at", "who", "from", "call", "target", "answer"), rows, empty="no calls")


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is no length of time; give a number and s, m, h or d, for example 30d"
        )
    return timedelta(seconds=int(match[1]) * _UNIT_S[match[2]])
