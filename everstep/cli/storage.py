"""Commands about the storage: `everstep storage show` and `everstep storage adopt`."""

from __future__ import annotations

import typer

from everstep.cli.options import JsonOption, UrlOption
from everstep.cli.terminal import command, terminal
from everstep.text import words

storage = typer.Typer(
    help="Show the storage of the service, or adopt another one.", no_args_is_help=True
)


@storage.command("show")
@command
def show_storage(json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show whether the storage belongs to the service's database."""
    out = terminal()
    found = out.client().storage.status()
    if out.as_json:
        out.json(found)
        return
    out.fields(
        [
            ("storage", found.uri),
            ("its id", found.found_id),
            ("the database's", found.known_id),
            ("problem", found.problem),
        ]
    )
    rows = [(one.run_id, one.database_submission, one.storage_submission) for one in found.behind]
    if rows:
        out.table(("run", "submission in the database", "in the storage"), rows, empty="")
    if found.unknown_runs:
        out.note(
            f"the storage has {words.count(len(found.unknown_runs), 'run')} that the database does "
            "not know"
        )


@storage.command("adopt")
@command
def adopt_storage(json_: JsonOption = False, url: UrlOption = None) -> None:
    """Continue with the storage that is there now, without data that it lacks. Read docs/runbook.md
    first."""
    out = terminal()
    done = out.client().storage.adopt()
    if out.as_json:
        out.json(done)
        return
    out.line(
        f"the service now uses storage {done.storage_id} (before: {done.previous_id or 'none'})"
    )
    if done.caught_up:
        out.line(f"runs with newer submissions in the storage: {', '.join(done.caught_up)}")
    if done.lost:
        out.line(f"runs whose data the storage lacks: {', '.join(done.lost)}")
