"""The command that submits a run."""

from __future__ import annotations

import importlib
import importlib.resources
import importlib.util
import json
import keyword
import sys
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer
import typer.core
from typer.core import TyperCommand

from everstep.cli.runs import watch_to_the_end
from everstep.cli.terminal import (
    CodeOption,
    Said,
    ScriptOption,
    SetOption,
    SpecArgument,
    TaskOption,
    TrainFnOption,
    command,
    terminal,
)
from everstep.code import GIT_TAG, git_state, rehearse_command, with_code
from everstep.errors import UsageError
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import MAX_TAGS, RunSpec, spec_schema
from everstep.spec.yaml_file import read_spec
from everstep.wire.drills import REHEARSAL_TAG

ARGV = "everstep.argv"
"""Where the context keeps the arguments of a script."""


class SubmitCommand(TyperCommand):
    """Keep what follows ``--`` for the script: its options are not those of this command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[ARGV] = args[end + 1 :]
        return super().parse_args(ctx, args[:end])


@command()
def submit(
    context: typer.Context,
    spec: SpecArgument = None,
    overrides: SetOption = None,
    code: CodeOption = None,
    task: TaskOption = None,
    train_fn: TrainFnOption = None,
    script: ScriptOption = None,
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
) -> Said | None:
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
    known = None if idempotency_key else _known_rehearsal(parsed)
    state = git_state(code, archive) if code and archive and not idempotency_key else None
    tags = dict(parsed.tags)
    for tag, value in ((REHEARSAL_TAG, known), (GIT_TAG, tags.get(GIT_TAG, state))):
        if value is not None and len({*tags, tag}) <= MAX_TAGS:
            tags[tag] = value
    parsed = parsed.model_copy(update={"tags": tags})
    client = terminal().client()
    if archive is not None:
        client.code.upload_packed(
            archive, project=raw.get("project"), create_project=create_project
        )
    if dry_run:
        resolved = client.runs.validate(parsed, create_project=create_project)
        return Said(resolved, [f"{resolved.name} is valid; nothing was submitted"])
    run = client.runs.create(parsed, idempotency_key, create_project=create_project)
    _note_best_mode(raw, parsed)
    if known is None:
        _note_rehearsal(parsed, spec, code, overrides or [])
    else:
        outcome, _, words = known.split(" ", 2)
        terminal().note(f"rehearsed: {outcome} ({words})")
    if watch:
        watch_to_the_end(run)
        return None
    note = f"{run.name} is {run.status}; `everstep watch {run.id}` shows it"
    return Said(run.run, [run.id], [note])


def _note_best_mode(raw: dict[str, Any], spec: RunSpec) -> None:
    """Print the inferred mode: a wrong guess would keep the worst checkpoint, and show only at the
    end."""
    checkpoint = spec.checkpoint
    if (
        checkpoint.named_metric is not None
        and (raw.get("checkpoint") or {}).get("best_mode") is None
    ):
        size = "smallest" if checkpoint.best_mode == "min" else "largest"
        terminal().note(
            f"the best checkpoint is the one with the {size} {checkpoint.best_metric} "
            f"(checkpoint.best_mode {checkpoint.best_mode}, inferred from the metric's name)"
        )


def _known_rehearsal(spec: RunSpec) -> str | None:
    """Return what a rehearsal of the same on this machine showed, as the value of a tag."""
    is_here = spec.code is not None and importlib.util.find_spec("train_fn") is not None
    return importlib.import_module("train_fn.rehearsal.verdict").known(spec) if is_here else None


def _note_rehearsal(
    parsed: RunSpec, spec: str | None, code: str | None, overrides: list[str]
) -> None:
    """Print how a restart is rehearsed on the user's own code."""
    own = parsed.code
    if own is None:
        return
    sets = [part for each in overrides for part in ("--set", each)]
    before = [spec] if spec not in (None, "-") else []
    after = [*sets, *(["--", *own.argv] if own.argv else [])]
    entry = own.model_dump(include={"script", "train_fn", "task"})
    command = rehearse_command(entry, code or "DIRECTORY", before, after)
    terminal().note(f"not rehearsed: `{command}` shows whether a restart changes what this trains")


# ---------------------------------------------------------------- guide

# What `--help` shows: the commands in groups, a newcomer's first, and an example of each. And
# what people type instead.

GROUPS = {
    "Begin here": "demo serve init submit watch runs logs why download",
    "Train": "validate catalog run rehearse sweep pause resume cancel note delete",
    "Watch": "show metrics events tensorboard",
    "Explain": "profile drill replay",
    "Data and checkpoints": "checkpoints",
    "Cluster": "cluster doctor cordon drain",
    "Team": "login logout project token alerts audit",
    "Service": "storage",
}
"""Commands by group, in the order in which they are shown."""

FORMER = {
    "alerts deliveries": "alerts list",
    "alerts retry": "alerts test",
    "compare": "show",
    "context": "login",
    "goodput": "show --goodput",
    "init schema": "init --schema",
    "init task": "init",
    "open": "show --web",
    "samples": "show --samples",
    "session": "token list --sessions",
    "session list": "token list --sessions",
    "session revoke": "token revoke",
    "stacks": "show --stacks",
    "storage adopt": "storage --adopt",
    "storage show": "storage",
    "stragglers": "show --ranks",
    "uncordon": "cordon --undo",
    "verify": "checkpoints --verify",
}
"""Names of version 0.1 and what they are now. Remove them one release later."""

SYNONYMS = {
    "describe": "show",
    "export": "download",
    "get": "show",
    "info": "show",
    "list": "runs",
    "ls": "runs",
    "nodes": "cluster",
    "plot": "show --web",
    "ps": "runs",
    "status": "show",
}
"""Names that people type for a command, and the command."""

_AGAIN = (
    "`everstep resume RUN` goes on with a paused run; a run that has ended is forked: `everstep "
    "submit SPEC.yaml --set resume_from.run_id=RUN`"
)
HINTS = {
    "fork": "`everstep submit SPEC.yaml --set resume_from.run_id=RUN` starts from a checkpoint",
    "kill": "`everstep cancel RUN` stops a run, `everstep drill RUN kill_worker` kills a rank",
    "rerun": _AGAIN,
    "restart": _AGAIN,
    "retry": _AGAIN,
    "stop": "`everstep pause RUN` stops a run for a while, `everstep cancel RUN` for good",
    "train": "`everstep submit SPEC.yaml` trains on the service, `everstep run SPEC.yaml --local` "
    "in this process",
}
"""Names that people type where more than one command may be meant, and what to type instead."""

EXAMPLES = {
    "serve": "--nodes 3 --port 9000",
    "init": "my_task",
    "submit": "examples/digits.yaml --watch",
    "runs": "--status RUNNING --sort -metrics.val_accuracy",
    "logs": "run_1anv6ek143hk --follow",
    "download": "run_1anv6ek143hk latest model",
    "validate": "examples/digits.yaml --set train.epochs=3",
    "run": "examples/digits.yaml --local",
    "rehearse": "--code my_code --script train.py --steps 12",
    "sweep": "examples/digits.yaml --metric val_accuracy --grid optimizer.lr=0.01,0.003",
    "note": "run_1anv6ek143hk 'diverges with warmup below 100'",
    "profile": "run_1anv6ek143hk --rank 1",
    "drill": "run_1anv6ek143hk kill_worker --rank 1",
    "replay": "run_1anv6ek143hk --from 400 --to 450",
    "cordon": "53e5fe4c",
    "drain": "53e5fe4c",
    "login": "https://everstep.example.org",
    "project": "create vision",
    "project create": "vision",
    "project delete": "vision",
    "token": "list",
    "token create": "ci --role submitter --project vision",
    "token revoke": "ci",
    "alerts": "list",
    "alerts add": "night-watch --when failed --to slack --target https://hooks.example.org/T1",
    "alerts test": "alr_1anv6ek143hk",
    "alerts delete": "alr_1anv6ek143hk",
}
"""What follows ``everstep COMMAND`` in the example at the end of its help: else a run, if it takes
one, or nothing."""
_A_RUN = "run_1anv6ek143hk"

_display_type = typer.core.TyperOption.display_type


def _type_of_values(self: Any, ctx: Any) -> str | None:
    """Return the type to show of an option, None for a flag: it takes no value."""
    return None if self.is_flag else _display_type(self, ctx)


typer.core.TyperOption.display_type = _type_of_values  # type: ignore[method-assign, assignment]


class Guide(typer.core.TyperGroup):
    """The program's commands in their groups, each with its first sentence and an example."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        place = {}
        for group, names in GROUPS.items():
            for name in names.split():
                place[name] = self.commands.pop(name)
                place[name].rich_help_panel = group  # type: ignore[attr-defined]
        assert not self.commands, f"put these into a group: {', '.join(self.commands)}"
        self.commands = place
        _furnish(self.commands, "")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first words name, also by a former name or a synonym."""
        for number in (2, 1):
            typed = " ".join(args[:number])
            if hint := HINTS.get(typed):
                ctx.fail(f"No such command {typed!r}: {hint}.")
            if found := FORMER.get(typed) or SYNONYMS.get(typed):
                if typed in FORMER:
                    typer.echo(f"`everstep {typed}` is now `everstep {found}`", err=True)
                args = [*found.split(), *args[number:]]
                break
        return super().resolve_command(ctx, args)


def _furnish(commands: dict[str, Any], before: str) -> None:
    """Give commands and those below them the first sentence of their help for lists, and an
    example."""
    for name, each in commands.items():
        path = f"{before}{name}"
        sentence = " ".join((each.help or "").split()).split(". ")[0].removesuffix(".")
        each.short_help = each.short_help or sentence
        takes_run = any(str(param.metavar).startswith("RUN") for param in each.params)
        example = EXAMPLES.get(path, _A_RUN if takes_run else "")
        each.epilog = f"Example: everstep {path} {example}".rstrip()
        _furnish(getattr(each, "commands", {}), f"{path} ")


# ---------------------------------------------------------------- skeleton

# Write the skeleton of a user task: a package that trains as it is.
#
# Its files are templates in ``skeleton_files``.

SCHEMA_FILE = "spec.schema.json"

_TAKEN = frozenset(
    {"everstep", "storage", "service", "train_fn", "tests", "torch", "torchvision", "ray", "numpy"}
)
"""Names that would shadow, or be shadowed by, packages that run beside the task."""


def write_skeleton(name: str, parent: Path) -> Path:
    """Write the task package ``name`` into a new folder of that name below ``parent``; return the
    folder. Raise UsageError, OSError."""
    _check_name(name)
    folder = parent / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} exists and is not empty; choose another name, or another directory with --in"
        )
    words = {
        "name": name,
        "class_name": class_of(name),
        "run_name": name.strip("_").replace("_", "-"),
    }
    files = {
        f"{name}/task.py": "task.py",
        "test_task.py": "test_task.py",
        "spec.yaml": "spec.yaml",
        "README.md": "README.md",
        ".everstepignore": "everstepignore",
    }
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    for path, source in files.items():
        (folder / path).write_text(Template(_template(source)).substitute(words))
    write_schema(folder / SCHEMA_FILE)
    return folder


def class_of(name: str) -> str:
    """Return the name of the class in a skeleton.

    >>> class_of("my_task")
    'MyTask'
    """
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def write_schema(path: Path) -> None:
    """Write the JSON schema of a spec, for an editor that completes and checks YAML."""
    path.write_text(json.dumps(spec_schema(), indent=1) + "\n")


def schema_line(path: str) -> str:
    """Return the first line of a YAML file that names its schema to an editor."""
    return f"# yaml-language-server: $schema={path}"


def _template(name: str) -> str:
    folder = importlib.resources.files("everstep.cli") / "skeleton_files"
    return (folder / f"{name}.template").read_text()


def _check_name(name: str) -> None:
    """Raise UsageError if ``name`` cannot be imported, or is the name of another package."""
    if (
        not (name.isascii() and name.isidentifier())
        or keyword.iskeyword(name)
        or not name.strip("_")
    ):
        raise UsageError(
            f"{name!r} is not a valid package name; use letters, digits and _, for example my_task"
        )
    if name in _TAKEN or name in sys.stdlib_module_names:
        raise UsageError(
            f"{name!r} is the name of a package that runs beside the task; choose another name"
        )
