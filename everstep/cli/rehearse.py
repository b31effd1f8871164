"""The command that rehearses a restart on a user's own code, on this machine and without a
service."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from everstep.cli.local import imported_for_training
from everstep.cli.submit import ARGV
from everstep.cli.terminal import (
    JsonOption,
    ScriptOption,
    SetOption,
    SpecArgument,
    TaskOption,
    TrainFnOption,
    UrlOption,
    command,
    terminal,
)
from everstep.code import with_code
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from everstep.spec.yaml_file import read_spec

REHEARSAL = "train_fn.rehearsal.plan"
"""Imported by name: this house does not import the others, and most of its users have no torch."""
_STYLES = {"equal": "green", "different": "red", "impossible": "red", "left out": "dim"}
_EXITS = {"equal": 0, "different": 1, "impossible": 2}
_WIDTH = 48


@command
def rehearse(
    context: typer.Context,
    spec: SpecArgument = None,
    overrides: SetOption = None,
    code: Annotated[
        str | None,
        typer.Option("--code", metavar="DIRECTORY", help="Your code, which the spec names."),
    ] = None,
    task: TaskOption = None,
    train_fn: TrainFnOption = None,
    script: ScriptOption = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, as processes of this machine.")] = 2,
    steps: Annotated[int, typer.Option(min=4, help="Steps that each training makes.")] = 12,
    max_samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Use only so many samples of each data set of a task or of es.loader, so that an "
            "epoch ends within the steps.",
        ),
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Train a few steps of your code on this machine, kill its ranks in several ways, and compare
    every step with a training that nobody disturbed. Exit code 0 if all is equal, 1 if something
    differs, 2 if it could not be tried."""
    raw, archive = with_code(
        None if spec is None else read_spec(spec), code, task, train_fn, script, context.meta[ARGV]
    )
    parsed = parse_spec(apply_overrides(raw, overrides or []))
    rehearsal = imported_for_training(REHEARSAL)
    out = terminal()

    def say(row: Any) -> None:
        if out.as_json:
            return
        source = f"  (went on from {row.went_on_from})" if row.went_on_from else ""
        out.line(
            f"{row.outcome:<10}  {row.name:<{_WIDTH}}  "
            f"{'' if row.difference else row.text}{source}".rstrip(),
            style=_STYLES[row.outcome],
        )

    report = rehearsal.rehearse(
        parsed, archive, ranks=ranks, steps=steps, max_samples=max_samples, say=say
    )
    if out.as_json:
        out.json(report)
    else:
        _explain(report)
    raise typer.Exit(_EXITS[report.outcome])


def _explain(report: Any) -> None:
    """Print what is first different, and what to write instead."""
    out = terminal()
    for row in report.rows:
        if row.traceback:
            for line in row.traceback.rstrip().splitlines():
                out.line(line, style="dim")
        if row.difference is not None:
            out.line()
            out.line(f"{row.name}:", style="bold")
            out.sentence(row.text)
            out.sentence(f"What to do: {row.difference.advice}.")
    for note in report.notes:
        out.note(note)
    out.line()
    out.sentence(report.text, style=_STYLES[report.outcome])
