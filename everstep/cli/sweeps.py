"""Commands about sweeps: `everstep sweep` with its own, and `everstep sweeps`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from everstep.cli.completion import sweep_ids
from everstep.cli.options import JsonOption, UrlOption
from everstep.cli.sweep_submit import submit
from everstep.cli.sweep_watch import states_of_runs, watch_to_the_end
from everstep.cli.terminal import command, terminal
from everstep.errors import UsageError
from everstep.spec.plain_text import printable
from everstep.spec.trials import words_of
from everstep.text import words
from everstep.wire.sweep import Sweep, SweepRun, best_first

_SUBMIT = "submit"


class SweepGroup(TyperGroup):
    """Take what is no command as the arguments of `submit`: `everstep sweep SPEC.yaml --grid …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        helps = ctx.help_option_names
        if args and args[0] not in self.commands and args[0] not in helps:
            args = [_SUBMIT, *args]
        return super().parse_args(ctx, args)


sweep = typer.Typer(
    cls=SweepGroup,
    no_args_is_help=True,
    help="Submit runs of one spec with other values: `everstep sweep SPEC.yaml --metric METRIC "
    "--grid FIELD=VALUE,VALUE`. `everstep sweep submit --help` lists the options.",
)
SweepArgument = Annotated[
    str,
    typer.Argument(metavar="SWEEP", help="Id of a sweep, sweep_….", autocompletion=sweep_ids),
]


sweep.command(_SUBMIT)(submit)


@sweep.command()
@command
def show(sweep_id: SweepArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show one sweep with its runs, the best first."""
    found = terminal().client().sweeps.get(sweep_id)
    runs = found.runs()
    if terminal().as_json:
        terminal().json({**found.sweep.model_dump(mode="json"), "runs": runs})
        return
    terminal().fields(_fields(found.sweep))
    terminal().line()
    headers = ("number", "run", "status", "step", found.metric, "at step", "values")
    terminal().table(
        headers,
        [_row(run) for run in best_first(runs, found.mode)],
        empty="no runs",
        text=("values",),
        dispensable=("at step", "number", "step"),
    )


@sweep.command()
@command
def watch(sweep_id: SweepArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show a sweep until it ends. Exit code 0 for SUCCEEDED, 1 for FAILED or CANCELLED."""
    watch_to_the_end(terminal().client().sweeps.get(sweep_id))


@sweep.command()
@command
def cancel(sweep_id: SweepArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Submit no further run, and cancel those that have not ended."""
    stopped = terminal().client().sweeps.get(sweep_id).cancel()
    if terminal().as_json:
        terminal().json(stopped.sweep)
    else:
        terminal().line(f"{stopped.id} {printable(stopped.name)} is {stopped.status}")


@sweep.command()
@command
def delete(
    sweep_id: SweepArgument,
    runs: Annotated[
        bool, typer.Option("--runs", help="Delete its runs, too, with every checkpoint and log.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Delete a sweep that has ended. Its runs stay, unless --runs is given."""
    out = terminal()
    found = out.client().sweeps.get(sweep_id)
    if not yes:
        if not (sys.stdin.isatty() and out.is_interactive):
            raise UsageError("deleting cannot be undone; add --yes to do it without a question")
        what = f" and its {words.count(found.progress.total, 'run')}" if runs else ""
        typer.confirm(f"Delete sweep {found.name}{what}?", abort=True, err=True)
    found.delete(runs=runs)
    if out.as_json:
        out.json({"deleted": found.id})
    else:
        out.line(f"{found.id} {printable(found.name)} is deleted")


@command
def sweeps(
    status: Annotated[
        list[str] | None,
        typer.Option(metavar="STATUS", help="Only sweeps with this status. Repeatable."),
    ] = None,
    project: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only sweeps of this project.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Maximum number of sweeps.")
    ] = 50,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """List sweeps, newest first."""
    found = terminal().client().sweeps.list(status=status, project=project)
    shown = [each.sweep for each, _ in zip(found, range(limit), strict=False)]
    if terminal().as_json:
        terminal().json(shown)
        return
    rows = [
        (
            each.id,
            each.name,
            each.status,
            f"{each.progress.ended}/{each.progress.total}",
            each.metric,
            None if each.best is None else words.number(each.best.value),
            None if each.best is None else each.best.run_id,
            words.ago(each.created_at),
        )
        for each in shown
    ]
    headers = ("id", "name", "status", "runs", "metric", "best", "best run", "created")
    dispensable = ("created", "metric", "best run")
    terminal().table(headers, rows, empty="no sweeps", text=("name",), dispensable=dispensable)


def _fields(found: Sweep) -> list[tuple[str, object]]:
    best = found.best
    return [
        ("id", found.id),
        ("name", found.name),
        ("project", found.project),
        ("status", found.status),
        ("reason", f"{found.reason.code}: {found.reason.message}" if found.reason else None),
        ("created", words.ago(found.created_at)),
        ("runs", states_of_runs(found.progress)),
        ("compares", f"{found.metric}, {found.mode}"),
        ("scheduler", found.scheduler),
        ("seed", found.seed),
        (
            "best",
            f"{words.number(best.value)} at step {best.step} by {best.run_id}: "
            f"{words_of(best.params)}"
            if best
            else None,
        ),
        ("page", found.links.dashboard),
    ]


def _row(run: SweepRun) -> tuple[object, ...]:
    status = "deleted" if run.is_deleted else run.status or "waiting"
    steps = f"{run.step}/{run.total_steps}" if run.total_steps is not None else str(run.step)
    value = None if run.value is None else words.number(run.value)
    return (run.number, run.run_id, status, steps, value, run.value_step, words_of(run.params))
