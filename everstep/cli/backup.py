"""`everstep backup` and `everstep restore`: a service's database and storage, copied and put back
on its own machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.service import require_server
from everstep.cli.terminal import JsonOption, command, terminal

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIRECTORY", help="The copy.")]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help=(
            "As `serve` was given it (or EVERSTEP_DATABASE, or EVERSTEP_DATABASE_FILE); by "
            "default SQLite in EVERSTEP_HOME."
        ),
    ),
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        metavar="URI",
        help="As `serve` was given it (or EVERSTEP_STORAGE); by default in EVERSTEP_HOME.",
    ),
]


@command
def backup(
    directory: DirectoryArgument,
    database: DatabaseOption = None,
    storage: StorageOption = None,
    database_only: Annotated[
        bool,
        typer.Option(
            "--database-only", help="Leave the storage out, for instance an object store."
        ),
    ] = False,
    follow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=(
                "A directory of the storage that is a link of your own (runs, code); may be "
                "repeated."
            ),
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Copy database and storage to a new directory, while the service runs; on its machine."""
    only = ["--database-only"] if database_only else []
    _run(
        "create",
        directory,
        database,
        storage,
        [*only, *(text for name in follow or () for text in ("--follow", name))],
    )


@command
def restore(
    directory: DirectoryArgument,
    database: DatabaseOption = None,
    storage: StorageOption = None,
    json_: JsonOption = False,
) -> None:
    """Put a copy into an empty EVERSTEP_HOME (or --database and --storage), before `everstep serve`
    is started there."""
    _run("restore", directory, database, storage, [])


def _run(
    what: str, directory: Path, database: str | None, storage: str | None, options: list[str]
) -> None:
    require_server()
    given = {"--database": database, "--storage": storage}
    arguments = [
        text for name, value in given.items() if value is not None for text in (name, value)
    ]
    options += ["--json"] if terminal().as_json else []
    os.execv(
        sys.executable,
        [sys.executable, "-m", "service.backup", what, str(directory), *arguments, *options],
    )
