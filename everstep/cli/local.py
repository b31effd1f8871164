"""Commands that need no service: try a spec in this process, write a task skeleton."""

from __future__ import annotations

import importlib
import importlib.util
import pdb
import traceback
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.options import JsonOption, SpecArgument, TaskOption, UrlOption
from everstep.cli.skeleton import SCHEMA_FILE, schema_line, write_schema, write_skeleton
from everstep.cli.terminal import Exit, command, terminal
from everstep.code.source import with_code
from everstep.errors import EverstepError, UsageError
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from everstep.spec.yaml_file import read_spec

TRAINING = "train_fn.standalone.local"
"""Imported by name: this house does not import the others, and most of its users have no torch."""
TRAINING_MODULES = ("train_fn", "storage", "torch", "torchvision", "ray", "psutil")

init = typer.Typer(help="Write a skeleton to start from.", no_args_is_help=True)


@command
def run(
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
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Train a spec in this process, for debugging: the loop, data and checkpoints of a run, on one
    rank and without loader processes."""
    if not local:
        raise UsageError(
            "`everstep run` only runs in this process: add --local, or use `everstep submit "
            "SPEC.yaml` to run on the service"
        )
    raw, archive = with_code(None if spec is None else read_spec(spec), code, task, None)
    parsed = parse_spec(apply_overrides(raw, overrides or []))
    missing = [name for name in TRAINING_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"training needs {', '.join(missing)}, not installed in this Python; run: pip install "
            "'everstep[server]'"
        )
    training = importlib.import_module(TRAINING)
    try:
        own = None if archive is None else training.OwnCode(archive, Path(str(code)).expanduser())
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


@init.command("task")
@command
def init_task(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the package, for example my_task.")
    ],
    directory: Annotated[
        Path,
        typer.Option("--in", metavar="DIRECTORY", help="Directory in which to create its folder."),
    ] = Path(),
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Write a working task to start from: model, data, loss, a test, and a spec to submit."""
    folder = write_skeleton(name, directory)
    files = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    if terminal().as_json:
        terminal().json({"directory": str(folder), "files": files})
        return
    for path in files:
        terminal().line(path)
    terminal().note(
        f"try it: cd {folder} && python -m pytest -q; README.md there says how to submit it"
    )


@init.command("schema")
@command
def init_schema(
    path: Annotated[
        Path, typer.Argument(metavar="[FILE]", help="File to write or replace.")
    ] = Path(SCHEMA_FILE),
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Write the JSON schema of a spec, with which an editor completes and checks YAML."""
    write_schema(path)
    if terminal().as_json:
        terminal().json({"file": str(path)})
        return
    terminal().line(str(path))
    terminal().note(f"begin a spec beside it with: {schema_line(path.name)}")
