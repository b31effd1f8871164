"""The command that trains steps of a run again, and says whether they are equal."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from everstep.cli.options import JsonOption, RunArgument, UrlOption
from everstep.cli.terminal import Exit, command, terminal
from everstep.errors import RunFailed


@command
def replay(
    run_id: RunArgument,
    from_step: Annotated[
        int,
        typer.Option("--from", min=0, metavar="STEP", help="0, or the step of a checkpoint."),
    ],
    to_step: Annotated[
        int, typer.Option("--to", min=1, metavar="STEP", help="Last step to train again.")
    ],
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks; by default as many as trained these steps."),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Wait for the end, and show the result."),
    ] = True,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0, help="Maximum time to wait."),
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Train steps of a run again, in a run of its own, and compare every step. Exit code 1 unless
    all are equal."""
    out = terminal()
    begun = out.client().runs.get(run_id).replay(from_step, to_step, workers=workers)
    if not wait:
        out.json(begun.run) if out.as_json else out.line(begun.id)
        return
    if not out.as_json:
        out.note(f"{begun.id} trains steps {from_step + 1} to {to_step} of {run_id} again")
    with suppress(RunFailed):  # its row says how it ended
        begun.wait(timeout_s)
    found = begun.run
    result = found.replay_of
    if out.as_json:
        out.json(found)
    elif result is None or result.message is None:
        out.line(f"not proven: the replay ended {found.status} and compared nothing")
    else:
        out.line(result.message)
    if result is None or result.result != "equal":
        raise typer.Exit(Exit.FAILED)
