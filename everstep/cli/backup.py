"""`everstep backup` and `everstep restore`: copy a service's database and storage, on its own
machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.options import JsonOption
from everstep.cli.service import require_server
from everstep.cli.terminal import command, terminal

DirectoryArgument = Annotated[
    Path, typer.Argument(metavar="DIRECTORY", help="Directory of the backup.")
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help=(
            "Same as for `serve`; default EVERSTEP_DATABASE, EVERSTEP_DATABASE_FILE, or SQLite in "
            "EVERSTEP_HOME."
        ),
    ),
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        metavar="URI",
        help="Same as for `serve`; default EVERSTEP_STORAGE, or in EVERSTEP_HOME.",
    ),
]


@command
def backup(
    directory: DirectoryArgument,
    database: DatabaseOption = None,
    storage: StorageOption = None,
    database_only: Annotated[
        bool,
        typer.Option("--database-only", help="Leave out the storage, for example an object store."),
    ] = False,
    follow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Also copy this directory of the storage (runs, code) if you made it a link. "
                "Repeatable."
            ),
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Copy database and storage to a new directory. Run it on the service's machine; the service
    may keep running."""
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
    """Restore a backup into an empty EVERSTEP_HOME (or --database and --storage), before `everstep
    serve` is started there."""
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
