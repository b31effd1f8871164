"""Commands about specs: `everstep validate` and `everstep catalog`."""

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
from everstep.cli.terminal import command, terminal
from everstep.code.source import with_code
from everstep.errors import UsageError
from everstep.spec.catalog import Catalog
from everstep.spec.catalog import catalog as known_here
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from everstep.spec.yaml_file import read_spec

_KINDS = tuple(Catalog.model_fields)


@command
def validate(
    spec: SpecArgument = None,
    overrides: SetOption = None,
    code: CodeOption = None,
    task: TaskOption = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Check a spec on this machine, without a service. Print every fault and exit with 2.

    With --json, print the spec with every default filled in. `everstep submit --dry-run` also asks
    the service, which knows projects, packages, code and checkpoints.
    """
    raw, _ = with_code(None if spec is None else read_spec(spec), code, task)
    parsed = parse_spec(apply_overrides(raw, overrides or []))
    if terminal().as_json:
        terminal().json(parsed)
    else:
        terminal().line(f"{spec or parsed.name} is valid")


@command
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
    json_: JsonOption = False,
    url: UrlOption = None,
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
