"""Commands about sweeps: `everstep sweep` with its own, and `everstep sweeps`."""

from __future__ import annotations

import itertools
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from everstep.cli.local import grid_of, random_of
from everstep.cli.terminal import (
    CodeOption,
    Columns,
    Exit,
    Said,
    SetOption,
    SpecArgument,
    TaskOption,
    command,
    sweep_ids,
    terminal,
)
from everstep.client.sweeps import SweepArguments, SweepHandle
from everstep.code import with_code
from everstep.errors import UsageError
from everstep.spec.overrides import apply_overrides
from everstep.spec.plain_text import printable
from everstep.spec.sweep import SweepSpec
from everstep.spec.trials import params_of, words_of
from everstep.spec.yaml_file import read_spec
from everstep.text import words
from everstep.wire.sweep import Sweep, SweepProgress, SweepRun, SweepStatus, best_first

# ---------------------------------------------------------------- sweep watch

# A sweep while it runs, a line for each change.


def watch_to_the_end(found: SweepHandle) -> None:
    """Print a line whenever something changes, until the sweep ends."""
    out, before = terminal(), ""
    while True:
        line = progress_line(found.sweep)
        if line != before and not out.as_json:
            out.line(line)
        before = line
        if found.status.terminal:
            break
        found.wait_for_change()
    if out.as_json:
        out.json(found.sweep)
    elif found.reason is not None:
        out.sentence(found.reason.message)
    if found.status is not SweepStatus.SUCCEEDED:
        raise typer.Exit(Exit.FAILED)


def progress_line(found: Sweep) -> str:
    """Return the status of a sweep, the states of its runs, and its best value."""
    best = f" · best {found.metric} {words.number(found.best.value)}" if found.best else ""
    return f"{found.status}: {states_of_runs(found.progress)}{best}"


def states_of_runs(progress: SweepProgress) -> str:
    """Return how many runs have each state: ``1 active, 2 succeeded``."""
    states = ("waiting", "active", "paused", "succeeded", "failed", "cancelled")
    numbers = {name: getattr(progress, name) for name in states}
    return ", ".join(f"{number} {name}" for name, number in numbers.items() if number)


# ---------------------------------------------------------------- sweep submit

# The command that submits a sweep: `everstep sweep SPEC.yaml --metric METRIC --grid …`.


@command()
def submit(
    spec: SpecArgument = None,
    metric: Annotated[
        str,
        typer.Option(metavar="NAME", help="Metric to compare runs by, for example val_accuracy."),
    ] = "",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE,VALUE", help="Try every value, in all combinations. Repeatable."
        ),
    ] = None,
    random: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=NAME:LOW..HIGH",
            help="Draw values: log:1e-4..1e-1, uniform:0..0.5, int:1..8, choice:adamw,sgd. "
            "Repeatable.",
        ),
    ] = None,
    max_runs: Annotated[
        int | None, typer.Option(min=1, help="Number of runs with --random.")
    ] = None,
    max_parallel: Annotated[
        int | None, typer.Option(min=1, help="Most runs at a time; default no limit.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(metavar="min|max", help="Which value is best; default by the metric's name."),
    ] = None,
    scheduler: Annotated[
        str,
        typer.Option(
            metavar="none|asha",
            help="asha pauses runs at rungs; only the best go on from there.",
        ),
    ] = "none",
    min_steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps of asha's first rung; default a ninth of each run's steps."
        ),
    ] = None,
    reduction_factor: Annotated[
        int | None, typer.Option(min=2, help="With asha, one run in so many goes on; default 3.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of --random; default one is drawn and shown.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the sweep; default the spec's.")
    ] = None,
    overrides: SetOption = None,
    code: CodeOption = None,
    task: TaskOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show the sweep until it ends.")
    ] = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Submit once: the same key returns the same sweep."),
    ] = None,
    create_project: Annotated[
        bool, typer.Option("--create-project", help="Create the project if it does not exist.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Let the service check the sweep, print the values of each run, and submit "
            "nothing. Code is uploaded all the same: the service checks it, too.",
        ),
    ] = False,
) -> Said | None:
    """Submit a sweep. Every run is checked first; a fault names the value that it comes from."""
    if not metric:
        raise UsageError("--metric is required: the metric to compare runs by, as in their curves")
    raw, archive = with_code(None if spec is None else read_spec(spec), code, task)
    raw = apply_overrides(raw, overrides or [])
    client = terminal().client()
    if archive is not None:
        project = str(raw.get("project", "default"))
        client.code.upload_packed(archive, project=project, create_project=create_project)
    asked: SweepArguments = {
        "metric": metric,
        "grid": grid_of(grid or []),
        "random": random_of(random or []),
        "max_runs": max_runs,
        "max_parallel": max_parallel,
        "mode": mode,  # type: ignore[typeddict-item]  # the service names its values
        "scheduler": _scheduler(scheduler, min_steps, reduction_factor),
        "seed": seed,
        "name": name,
    }
    if dry_run:
        return _checked(client.sweeps.validate(raw, **asked, create_project=create_project))
    made = client.sweeps.create(
        raw, **asked, idempotency_key=idempotency_key, create_project=create_project
    )
    if watch:
        watch_to_the_end(made)
        return None
    note = (
        f"{made.name} has {words.count(made.progress.total, 'run')}; "
        f"`everstep sweep show {made.id}` shows them"
    )
    return Said(made.sweep, [made.id], [note])


def _checked(sweep: SweepSpec) -> Said:
    """Print the values of each run of a sweep that was not submitted."""
    params = params_of(sweep)
    if not terminal().as_json:
        rows = [(number, words_of(values)) for number, values in enumerate(params)]
        terminal().table(("number", "values"), rows, empty="no runs", text=("values",))
    drawn = f"; add --seed {sweep.seed} to submit these" if sweep.random else ""
    count = words.count(len(params), "run")
    note = f"{sweep.name} is valid, with {count}; nothing was submitted{drawn}"
    return Said({**sweep.model_dump(mode="json"), "runs": params}, notes=[note])


def _scheduler(name: str, min_steps: int | None, reduction_factor: int | None) -> dict[str, Any]:
    given = {"min_steps": min_steps, "reduction_factor": reduction_factor}
    options = {option: value for option, value in given.items() if value is not None}
    if options and name != "asha":
        flag = "--" + next(iter(options)).replace("_", "-")
        raise UsageError(f"{flag} is for --scheduler asha; add that, or leave {flag} out")
    return {"name": name, **options}


# ---------------------------------------------------------------- sweeps

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
@command()
def show(sweep_id: SweepArgument) -> Said:
    """Show one sweep with its runs, the best first."""
    found = terminal().client().sweeps.get(sweep_id)
    runs = found.runs()
    if not terminal().as_json:
        terminal().fields(_fields(found.sweep))
        terminal().line()
        show_runs = Columns[SweepRun](
            ("number", "run", "status", "step", found.metric, "at step", "values"),
            _row,
            empty="no runs",
            text=("values",),
            dispensable=("at step", "number", "step"),
        )
        show_runs(best_first(runs, found.mode))
    return Said({**found.sweep.model_dump(mode="json"), "runs": runs})


@sweep.command()
@command()
def watch(sweep_id: SweepArgument) -> None:
    """Show a sweep until it ends. Exit code 0 for SUCCEEDED, 1 for FAILED or CANCELLED."""
    watch_to_the_end(terminal().client().sweeps.get(sweep_id))


@sweep.command()
@command()
def cancel(sweep_id: SweepArgument) -> Said:
    """Submit no further run, and cancel those that have not ended."""
    stopped = terminal().client().sweeps.get(sweep_id).cancel().sweep
    return Said(stopped, [f"{stopped.id} {printable(stopped.name)} is {stopped.status}"])


@sweep.command()
@command()
def delete(
    sweep_id: SweepArgument,
    runs: Annotated[
        bool, typer.Option("--runs", help="Delete its runs, too, with every checkpoint and log.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> Said:
    """Delete a sweep that has ended. Its runs stay, unless --runs is given."""
    out = terminal()
    found = out.client().sweeps.get(sweep_id)
    if not yes:
        if not (sys.stdin.isatty() and out.is_interactive):
            raise UsageError("deleting cannot be undone; add --yes to do it without a question")
        what = f" and its {words.count(found.progress.total, 'run')}" if runs else ""
        typer.confirm(f"Delete sweep {found.name}{what}?", abort=True, err=True)
    found.delete(runs=runs)
    return Said({"deleted": found.id}, [f"{found.id} {printable(found.name)} is deleted"])


@command(
    Columns[Sweep](
        ("id", "name", "status", "runs", "metric", "best", "best run", "created"),
        lambda each: (
            each.id,
            each.name,
            each.status,
            f"{each.progress.ended}/{each.progress.total}",
            each.metric,
            None if each.best is None else words.number(each.best.value),
            None if each.best is None else each.best.run_id,
            words.ago(each.created_at),
        ),
        empty="no sweeps",
        text=("name",),
        dispensable=("created", "metric", "best run"),
    )
)
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
) -> list[Sweep]:
    """List sweeps, newest first."""
    found = terminal().client().sweeps.list(status=status, project=project)
    return [each.sweep for each in itertools.islice(found, limit)]


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
