"""Commands that need no service: run a spec here, show and check specs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pdb
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli.submit import (
    ARGV,
    SCHEMA_FILE,
    class_of,
    schema_line,
    write_schema,
    write_skeleton,
)
from everstep.cli.terminal import (
    CodeOption,
    Exit,
    Said,
    ScriptOption,
    SetOption,
    SpecArgument,
    TaskOption,
    TrainFnOption,
    command,
    terminal,
)
from everstep.code import MODULE_FLAG, with_code
from everstep.errors import EverstepError, InvalidSpec, UsageError
from everstep.spec.code import CodeSpec
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from everstep.spec.tasks import Catalog
from everstep.spec.tasks import catalog as known_here
from everstep.spec.yaml_file import read_spec
from everstep.supported import install_command

TRAINING = "train_fn.standalone.command"
"""Imported by name: this house does not import the others, and most of its users have no torch."""
TRAINING_MODULES = ("train_fn", "storage", "torch", "torchvision", "ray", "psutil")


def imported_for_training(module: str) -> Any:
    """Import a module that trains on this machine. Raise UsageError if what it needs is missing."""
    missing = [name for name in TRAINING_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"training needs {', '.join(missing)}, not installed in this Python; run: "
            f"{install_command('server')}"
        )
    return importlib.import_module(module)


@command()
def run(
    context: typer.Context,
    spec: SpecArgument = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run as one rank in this process, without the service.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Override a field, for example train.max_steps=3."
        ),
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            "--code", metavar="DIRECTORY", help="Run the task in this code instead of the spec's."
        ),
    ] = None,
    task: TaskOption = None,
    train_fn: TrainFnOption = None,
    script: ScriptOption = None,
    storage: Annotated[
        str, typer.Option(metavar="DIRECTORY", help="Directory for checkpoints, journal and logs.")
    ] = "out/local",
    run_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Id of the run; an existing one is resumed. Default a new one.",
        ),
    ] = None,
    debugger: Annotated[
        bool, typer.Option("--pdb", help="Open the Python debugger if training raises.")
    ] = False,
) -> None:
    """Train a spec in this process, for debugging: the loop, data and checkpoints of a run, on one
    rank and without loader processes. A script and a Ray Train function run as they are."""
    if not local:
        raise UsageError(
            "`everstep run` only runs in this process: add --local, or use `everstep submit "
            "SPEC.yaml` to run on the service"
        )
    raw, archive = with_code(
        None if spec is None else read_spec(spec), code, task, train_fn, script, context.meta[ARGV]
    )
    parsed = parse_spec(apply_overrides(raw, overrides or []))
    training = imported_for_training(TRAINING)
    own = None if archive is None else training.OwnCode(archive, Path(str(code)).expanduser())
    try:
        if own is not None and parsed.code is not None and parsed.code.task is None:
            _run_own(parsed.code, own.path)
            return
        ended = training.run_local(
            parsed, storage, run_id, terminal().note if terminal().as_json else terminal().line, own
        )
    except EverstepError:
        raise
    except Exception as exc:
        traceback.print_exc()
        if debugger:
            pdb.post_mortem(exc.__traceback__)
        raise typer.Exit(Exit.FAILED) from exc
    if terminal().as_json:
        terminal().json(
            {"step": ended.step, "metrics": ended.metrics, "checkpoints": ended.checkpoints}
        )
    raise typer.Exit(ended.code)


def _run_own(code: CodeSpec, directory: Path) -> None:
    """Run a script in place of this process, or a Ray Train function by Ray's local mode. Both run
    in their directory."""
    if not directory.is_dir():
        raise UsageError(f"--code {directory}: is an archive; give the directory that it is from")
    os.chdir(directory)
    if code.script is not None:
        module = code.script.startswith(MODULE_FLAG)
        words = code.script.split() if module else [code.script]
        os.execv(sys.executable, [sys.executable, *words, *code.argv])
    sys.path.insert(0, str(Path.cwd()))
    function, beside = _named(str(code.train_fn)), {}
    if code.datasets is not None:
        make = _named(code.datasets)
        made = make(*([dict(code.config)] if inspect.signature(make).parameters else []))
        beside = {"datasets": made[0] if isinstance(made, tuple) else made}
    scaling = importlib.import_module("ray.train").ScalingConfig(num_workers=0)
    trainer = importlib.import_module("ray.train.torch").TorchTrainer
    takes = {"train_loop_config": code.config} if inspect.signature(function).parameters else {}
    trainer(function, scaling_config=scaling, **takes, **beside).fit()


def _named(entry: str) -> Any:
    module_name, _, name = entry.partition(":")
    return getattr(importlib.import_module(module_name), name)


@command()
def init(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of the package, for example my_task; with --schema the file to write.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path,
        typer.Option("--in", metavar="DIRECTORY", help="Directory in which to create its folder."),
    ] = Path(),
    schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            help="Write only the JSON schema of a spec, with which an editor completes and checks "
            "YAML.",
        ),
    ] = False,
) -> Said:
    """Write a working task to start from: model, data, loss, a test, and a spec to submit."""
    if schema:
        path = directory / (name or SCHEMA_FILE)
        write_schema(path)
        note = f"begin a spec beside it with: {schema_line(path.name)}"
        return Said({"file": str(path)}, [str(path)], [note])
    if name is None:
        raise UsageError("name the package: everstep init my_task")
    name = name.replace("-", "_")
    folder = write_skeleton(name, directory)
    trial = "python -m pytest -q"
    if importlib.util.find_spec("pytest") is None:
        entry = f"{name}.task:{class_of(name)}"
        trial = f"everstep run spec.yaml --local --code . --task {entry}"
    files = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    note = f"try it: cd {folder} && {trial}; README.md there says how to submit it"
    return Said({"directory": str(folder), "files": files}, files, [note])


# ---------------------------------------------------------------- specs

_KINDS = tuple(Catalog.model_fields)


@command()
def validate(
    spec: SpecArgument = None,
    overrides: SetOption = None,
    code: CodeOption = None,
    task: TaskOption = None,
    train_fn: TrainFnOption = None,
    script: ScriptOption = None,
) -> Said:
    """Check a spec, and code of --code without running it, on this machine. Print every fault and
    exit with 2.

    With --json, print the spec with every default filled in. `everstep submit --dry-run` also asks
    the service, which knows projects, packages and checkpoints.
    """
    raw, archive = with_code(
        None if spec is None else read_spec(spec), code, task, train_fn, script
    )
    parsed = parse_spec(apply_overrides(raw, overrides or []))
    if archive is not None and parsed.code is not None:
        members = importlib.import_module("storage.code").read_members(archive)
        faults_of = importlib.import_module("service.submission_rules.user_code").faults_of
        if faults := faults_of(parsed.code, {each.path: each.data for each in members}):
            raise InvalidSpec(tuple(faults))
    return Said(parsed, [f"{spec or parsed.name} is valid"])


@command()
def catalog(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]",
            help=f"Only one of {', '.join(_KINDS)}.",
            show_default=False,
            autocompletion=lambda incomplete: [
                name for name in _KINDS if name.startswith(incomplete)
            ],
        ),
    ] = None,
) -> None:
    """List what a spec can name: tasks, models, data sets, optimizers and schedules, with their
    arguments. Needs no service."""
    if kind not in (None, *_KINDS):
        raise UsageError(f"{kind!r} is not in the catalog; use one of {', '.join(_KINDS)}")
    found = known_here()
    if terminal().as_json:
        terminal().json(found if kind is None else {kind: getattr(found, kind)})
        return
    rows = [
        (name, entry.name, _arguments(entry.args_schema), entry.task)
        for name in _KINDS
        if kind in (None, name)
        for entry in getattr(found, name)
    ]
    headers = ("kind", "name", "arguments", "task")
    terminal().table(headers, rows, empty="", text=("arguments",), dispensable=("task",))


def _arguments(schema: dict[str, Any]) -> str | None:
    """Return the names of arguments with their defaults, as they stand in a spec."""
    required = schema.get("required", [])
    found = [
        name if name in required else f"{name}={_default(each)}"
        for name, each in schema.get("properties", {}).items()
    ]
    return ", ".join(found) or None


def _default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    return "null" if default is None else str(default).lower() if default is True else str(default)


# ---------------------------------------------------------------- rehearsal

_EXITS = {"equal": 0, "different": 1, "impossible": 2}


@command()
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
    every: Annotated[
        bool, typer.Option("--all", help="Try every death, also once something differs.")
    ] = False,
) -> None:
    """Train a few steps of your code on this machine, kill its ranks in several ways, and compare
    every step with a training that nobody disturbed. It ends at the first difference. Exit code 0
    if all is equal, 1 if something differs, 2 if it could not be tried."""
    raw, archive = with_code(
        None if spec is None else read_spec(spec), code, task, train_fn, script, context.meta[ARGV]
    )
    parsed = parse_spec(apply_overrides(raw, overrides or []))
    rehearsal = imported_for_training("train_fn.rehearsal.plan")
    verdict = imported_for_training("train_fn.rehearsal.verdict")
    out = terminal()
    say = (lambda row: None) if out.as_json else partial(verdict.say, out)
    begin = out.note if out.is_interactive else lambda name: None
    options = {"ranks": ranks, "steps": steps, "max_samples": max_samples, "every": every}
    report = rehearsal.rehearse(parsed, archive, **options, say=say, begin=begin)
    if out.as_json:
        out.json(report)
    else:
        verdict.explain(out, report)
    out.note(verdict.keep(parsed, report, max_samples or 0))
    raise typer.Exit(_EXITS[report.outcome])
