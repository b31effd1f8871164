"""The command that submits a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from everstep.cli.options import (
    CodeOption,
    JsonOption,
    SetOption,
    SpecArgument,
    TaskOption,
    UrlOption,
)
from everstep.cli.runs import watch_to_the_end
from everstep.cli.terminal import command, terminal
from everstep.client.client import Client
from everstep.code.source import with_code
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from everstep.spec.yaml_file import read_spec

ARGV = "everstep.argv"
"""Where the context keeps the arguments of a script."""


class SubmitCommand(TyperCommand):
    """Keep what follows ``--`` for the script: its options are not those of this command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[ARGV] = args[end + 1 :]
        return super().parse_args(ctx, args[:end])


@command
def submit(
    context: typer.Context,
    spec: SpecArgument = None,
    overrides: SetOption = None,
    code: CodeOption = None,
    task: TaskOption = None,
    train_fn: Annotated[
        str | None,
        typer.Option(
            "--train-fn", metavar="MODULE:FUNCTION", help="Ray Train function in the code."
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            "--script",
            metavar="FILE.py",
            help="Script in the code, as for torchrun; its arguments follow --. "
            "`-m pkg.train` runs a module.",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show the run until it ends.")
    ] = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Submit once: the same key returns the same run."),
    ] = None,
    create_project: Annotated[
        bool,
        typer.Option("--create-project", help="Create the run's project if it does not exist."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Let the service check the spec, and submit nothing. Code is uploaded all the "
            "same: the service checks it, too.",
        ),
    ] = False,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Submit a run. For an invalid spec, print every fault and exit with 2."""
    raw, archive = with_code(
        None if spec is None else read_spec(spec),
        code,
        task,
        train_fn,
        script,
        context.meta[ARGV],
    )
    raw = apply_overrides(raw, overrides or [])
    parsed = parse_spec(raw)
    client = terminal().client()
    if archive is not None:
        client.code.upload_packed(archive, project=parsed.project, create_project=create_project)
    if dry_run:
        _check(client, parsed, create_project=create_project)
        return
    run = client.runs.create(parsed, idempotency_key, create_project=create_project)
    _note_best_mode(raw, parsed)
    if watch:
        watch_to_the_end(run)
    elif terminal().as_json:
        terminal().json(run.run)
    else:
        terminal().line(run.id)
        terminal().note(f"{run.name} is {run.status}; `everstep watch {run.id}` shows it")


def _check(client: Client, spec: RunSpec, *, create_project: bool) -> None:
    """Let the service check a spec. Raise InvalidSpec with every fault."""
    resolved = client.runs.validate(spec, create_project=create_project)
    if terminal().as_json:
        terminal().json(resolved)
    else:
        terminal().line(f"{resolved.name} is valid; nothing was submitted")


def _note_best_mode(raw: dict[str, Any], spec: RunSpec) -> None:
    """Print the inferred mode: a wrong guess would keep the worst checkpoint, and show only at the
    end."""
    checkpoint = spec.checkpoint
    if (
        checkpoint.best_metric is not None
        and (raw.get("checkpoint") or {}).get("best_mode") is None
    ):
        size = "smallest" if checkpoint.best_mode == "min" else "largest"
        terminal().note(
            f"the best checkpoint is the one with the {size} {checkpoint.best_metric} "
            f"(checkpoint.best_mode {checkpoint.best_mode}, inferred from the metric's name)"
        )
