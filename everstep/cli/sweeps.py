"""The command `everstep sweep`: try values of a spec, each in a run of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlencode

import typer

from everstep.cli import terminal as cli
from everstep.code import GIT_TAG, git_state, with_code
from everstep.errors import EverstepError, UsageError
from everstep.spec.overrides import apply_overrides
from everstep.spec.run_spec import MAX_TAGS
from everstep.spec.yaml_file import read_spec
from everstep.supported import install_command
from everstep.wire.events import mode_of

if TYPE_CHECKING:
    from optuna import Study

Texts = list[str] | None
Mode = Literal["min", "max"]
Sampler = Literal["grid", "random", "tpe", "cmaes"]
Pruner = Literal["none", "asha", "hyperband", "median"]
GridOption = typer.Option(metavar="FIELD=VALUE,VALUE", help="Values of a field. Repeatable.")
RangeOption = typer.Option(
    "--range",
    metavar="FIELD=LOW..HIGH",
    help="Numbers of a field: LOW..HIGH, log:LOW..HIGH or int:LOW..HIGH. Repeatable.",
)
StudyOption = typer.Option(
    metavar="NAME",
    help="Begin this study or go on with it, in studies/NAME.db; default the spec's name.",
)


@cli.command()
def sweep(
    context: typer.Context,
    spec: cli.SpecArgument = None,
    metric: Annotated[str, typer.Option(help="Metric to compare runs by.")] = "",
    mode: Annotated[Mode | None, typer.Option(help="Default by the metric's name.")] = None,
    grid: Annotated[Texts, GridOption] = None,
    ranges: Annotated[Texts, RangeOption] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Default all of a grid.")] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default 4.")] = None,
    sampler: Annotated[Sampler | None, typer.Option(help="Default grid, with --range tpe.")] = None,
    pruner: Annotated[Pruner, typer.Option(help="Which runs are cancelled early.")] = "none",
    min_steps: Annotated[int, typer.Option(min=0, help="Steps before the first pruning.")] = 0,
    study: Annotated[str | None, StudyOption] = None,
    overrides: cli.SetOption = None,
    code: cli.CodeOption = None,
    task: cli.TaskOption = None,
) -> cli.Said:
    """Try values of a spec, each in a run of its own, and name the best. Ctrl-C leaves the runs
    as they are; `everstep sweep --study NAME` goes on with them."""
    for package in ("optuna", "cmaes"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{package} is not installed; run: {install_command('sweeps')}")
    from everstep.client.study import Sweep, begun, opened

    raw: dict[str, Any] = {}
    archive = None
    if spec is not None or code is not None or study is None:
        raw, archive = with_code(None if spec is None else read_spec(spec), code, task)
        raw = apply_overrides(raw, overrides or [])
        tags = raw.get("tags") or {}
        # each trial gets two more
        if code and archive and isinstance(tags, dict) and len(tags) < MAX_TAGS - 2:
            state = git_state(code, archive)
            raw = raw if state is None else {**raw, "tags": {GIT_TAG: state, **tags}}
    name = study or str(raw.get("name") or "study").replace(" ", "-")
    file = Path(f"{name}.db") if "/" in name else Path("studies", f"{name}.db")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", file.stem):
        raise UsageError(f"--study {name}: use letters, digits, dots, - and _, for example lr-1")
    asked = {"trials": trials, "parallel": parallel}
    sources = {each: context.get_parameter_source(each) for each in context.params}
    given = {each for each, source in sources.items() if source and source.name == "COMMANDLINE"}
    others = given - {"study", "json_", "url", *asked}
    client, note = cli.terminal().client(), cli.terminal().note
    with contextlib.closing(_lock(file)):
        if not file.exists():
            plan: dict[str, Any] = {"spec": raw, "metric": metric, **asked}
            plan |= {"mode": mode or mode_of(metric), "min_steps": min_steps}
            plan |= {"grid": grid or [], "ranges": ranges or [], "parallel": parallel or 4}
            plan |= {"sampler": sampler or ("tpe" if ranges else "grid"), "pruner": pruner}
            found = begun(client, file, plan, archive)
        elif others:
            raise UsageError(
                f"{file}: this study has begun; leave out {', '.join(sorted(others))} to go on "
                "with it, or name another --study"
            )
        else:
            changes = {each: value for each, value in asked.items() if value is not None}
            found = opened(file, changes)
        query = urlencode({"tag": f"study={found.study_name}"})
        note(f"study {found.study_name}, kept in {file}: {client.url}/runs?{query}")
        tried = Sweep(client, found, note)
        try:
            tried.run()
        except KeyboardInterrupt:
            ids = " ".join(str(trial.user_attrs.get("run", "")) for trial in tried.unended())
            note(
                f"`everstep sweep --study {study or name}` goes on; `everstep cancel {ids}` ends it"
            )
            raise
        return _result(found)


def _lock(file: Path) -> sqlite3.Connection:
    """Return what keeps others from a study until it is closed, also by this process's death."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = sqlite3.connect(f"{file}.lock", timeout=0, isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as exc:
        raise UsageError(
            f"{file}.lock: {exc}; end the `everstep sweep` that has this study, or name a "
            "directory that can be written: --study DIRECTORY/NAME"
        ) from exc
    return lock


def _result(study: Study) -> cli.Said:
    """Print each trial, the best first. Raise EverstepError if none has a value."""
    metric, name = study.user_attrs["plan"]["metric"], study.study_name
    sign = -1 if study.direction.name == "MAXIMIZE" else 1
    found: list[dict[str, Any]] = [
        {"trial": each.number, "run": each.user_attrs.get("run"), "state": each.state.name}
        | {"value": each.value, "values": each.user_attrs.get("values")}
        for each in study.trials
        if each.state.name != "WAITING"
    ]
    found.sort(key=lambda each: (each["state"] != "COMPLETE", sign * (each["value"] or 0)))
    if not cli.terminal().as_json:
        rows = [(*list(each.values())[:-1], json.dumps(each["values"])) for each in found]
        headers = ("trial", "run", "state", metric, "values")
        cli.terminal().table(headers, rows, empty="", text=("values",))
    if found[0]["state"] != "COMPLETE":
        raise EverstepError(
            f"study {name}: no run ended with a value of {metric}; `everstep why RUN` shows the "
            "cause. Begin another study once it is mended"
        )
    best = f"the best is {found[0]['run']}: everstep download {found[0]['run']} best"
    return cli.Said({"study": name, "metric": metric, "trials": found}, notes=[best])
