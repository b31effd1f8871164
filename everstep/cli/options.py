"""Arguments and options that several commands of the CLI share."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli import completion

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Id of the run, such as run_….", autocompletion=completion.run_ids
    ),
]
RunsArgument = Annotated[
    list[str],
    typer.Argument(metavar="RUN…", help="Ids of runs.", autocompletion=completion.run_ids),
]
SpecArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[SPEC.yaml]",
        help="File with the spec; - for standard input.",
        show_default=False,
        autocompletion=completion.spec_paths,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Override a field, for example train.epochs=3."
    ),
]
CodeOption = Annotated[
    str | None,
    typer.Option(
        "--code",
        metavar="DIRECTORY",
        help="Upload this code and run it instead of the spec's task.",
    ),
]
TaskOption = Annotated[
    str | None, typer.Option("--task", metavar="MODULE:CLASS", help="Task class in the code.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one value per line.")]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="URL of the service; default EVERSTEP_URL, else this machine.",
    ),
]
