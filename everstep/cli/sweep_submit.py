"""The command that submits a sweep: `everstep sweep SPEC.yaml --metric METRIC --grid …`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from everstep.cli.options import (
    CodeOption,
    JsonOption,
    SetOption,
    SpecArgument,
    TaskOption,
    UrlOption,
)
from everstep.cli.sweep_watch import watch_to_the_end
from everstep.cli.terminal import command, terminal
from everstep.cli.vary import grid_of, random_of
from everstep.client.sweeps import SweepArguments
from everstep.code.source import with_code
from everstep.errors import UsageError
from everstep.spec.overrides import apply_overrides
from everstep.spec.sweep import SweepSpec
from everstep.spec.trials import params_of, words_of
from everstep.spec.yaml_file import read_spec
from everstep.text import words


@command
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
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
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
        _show_checked(client.sweeps.validate(raw, **asked, create_project=create_project))
        return
    made = client.sweeps.create(
        raw, **asked, idempotency_key=idempotency_key, create_project=create_project
    )
    if watch:
        watch_to_the_end(made)
    elif terminal().as_json:
        terminal().json(made.sweep)
    else:
        terminal().line(made.id)
        total = words.count(made.progress.total, "run")
        terminal().note(f"{made.name} has {total}; `everstep sweep show {made.id}` shows them")


def _show_checked(sweep: SweepSpec) -> None:
    """Print the runs of a sweep that was not submitted."""
    params = params_of(sweep)
    if terminal().as_json:
        terminal().json({**sweep.model_dump(mode="json"), "runs": params})
        return
    rows = [(number, words_of(values)) for number, values in enumerate(params)]
    terminal().table(("number", "values"), rows, empty="no runs", text=("values",))
    drawn = f"; add --seed {sweep.seed} to submit these" if sweep.random else ""
    count = words.count(len(params), "run")
    terminal().note(f"{sweep.name} is valid, with {count}; nothing was submitted{drawn}")


def _scheduler(name: str, min_steps: int | None, reduction_factor: int | None) -> dict[str, Any]:
    given = {"min_steps": min_steps, "reduction_factor": reduction_factor}
    options = {option: value for option, value in given.items() if value is not None}
    if options and name != "asha":
        flag = "--" + next(iter(options)).replace("_", "-")
        raise UsageError(f"{flag} is for --scheduler asha; add that, or leave {flag} out")
    return {"name": name, **options}
