"""Output of the CLI (tables, plain lines, JSON), and how errors become exit codes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, ParamSpec, cast

import typer
from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from everstep.client.client import Client
from everstep.errors import (
    AuthError,
    Conflict,
    EverstepError,
    InvalidSpec,
    NotFound,
    RateLimited,
    Unavailable,
    UsageError,
)
from everstep.spec.plain_text import json_line, printable, printable_lines
from everstep.wire import RunStatus

P = ParamSpec("P")
CLI_TRIES = 4


class Exit(IntEnum):
    """Exit codes of the CLI."""

    SUCCEEDED = 0
    FAILED = 1
    """The run ended FAILED or CANCELLED, or the request failed on the service or this machine."""
    USAGE = 2
    """Wrong usage, an invalid spec, or a request that the service refuses."""
    UNREACHABLE = 3
    INTERRUPTED = 130


_EXIT_OF: tuple[tuple[type[EverstepError], Exit], ...] = (
    (Unavailable, Exit.UNREACHABLE),
    (RateLimited, Exit.UNREACHABLE),
    *((kind, Exit.USAGE) for kind in (UsageError, InvalidSpec, AuthError, NotFound, Conflict)),
    (EverstepError, Exit.FAILED),
)


def exit_code_of(error: EverstepError) -> Exit:
    """Return the exit code for an error."""
    return next(code for kind, code in _EXIT_OF if isinstance(error, kind))


def exit_code_of_status(status: RunStatus) -> Exit:
    """Return the exit code for a run's final status."""
    return Exit.FAILED if status in (RunStatus.FAILED, RunStatus.CANCELLED) else Exit.SUCCEEDED


class _Console(Console):
    """Rich's console, but a broken pipe is raised to the caller."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(*, stderr: bool = False) -> Console:
    return _Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


@dataclass
class Terminal:
    """Standard output and error of one command."""

    as_json: bool = False
    url: str | None = None
    out: Console = field(default_factory=_console)
    err: Console = field(default_factory=lambda: _console(stderr=True))

    def client(self) -> Client:
        return Client(self.url, max_tries=CLI_TRIES)

    @property
    def is_interactive(self) -> bool:
        """Return whether a person is watching, so that bars and colours make sense."""
        return self.out.is_terminal and not self.as_json

    def line(self, text: str = "", style: str | None = None) -> None:
        """Print one line. Control characters are replaced."""
        self.out.print(Text(printable(text), style=style or ""))

    def note(self, text: str) -> None:
        """Print one line to standard error, beside the output proper."""
        self.err.print(Text(printable(text), style="dim"))

    def json(self, value: Any) -> None:
        """Print one value as one line of JSON."""
        sys.stdout.write(json_line(_plain(value)) + "\n")
        sys.stdout.flush()

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
        """Print rows below headers. In a pipe the columns are plain and never cut."""
        cells = [[printable("-" if cell is None else str(cell)) for cell in row] for row in rows]
        if not cells:
            self.note(empty)
        elif self.is_interactive:
            table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
            for header in headers:
                table.add_column(header, overflow="fold")
            for row in cells:
                table.add_row(*map(Text, row))
            self.out.print(table, soft_wrap=False)
        else:
            widths = [
                max(len(row[column]) for row in [list(headers), *cells])
                for column in range(len(headers))
            ]
            for row in [[header.upper() for header in headers], *cells]:
                self.line(
                    "  ".join(
                        cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                    ).rstrip()
                )

    def fields(self, pairs: Iterable[tuple[str, object]]) -> None:
        """Print names and values, one pair per line; pairs with None are left out."""
        shown = [(printable(name), str(value)) for name, value in pairs if value is not None]
        width = max((len(name) for name, _ in shown), default=0)
        for name, value in shown:
            self.out.print(Text.assemble((name.ljust(width), "bold"), "  ", printable(value)))

    def fail(self, message: str, code: Exit, details: dict[str, Any] | None = None) -> typer.Exit:
        """Print an error to standard error; return the exception to raise."""
        if self.as_json:
            sys.stderr.write(json_line({"error": {"message": message, **(details or {})}}) + "\n")
        else:
            self.err.print(Text.assemble(("error: ", "bold red"), printable_lines(message)))
        return typer.Exit(code)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


_CURRENT: ContextVar[Terminal] = ContextVar("terminal")


def begin(as_json: bool, url: str | None) -> None:
    """Start a command line, with the options before the command's name."""
    _CURRENT.set(Terminal(as_json, url))


def terminal() -> Terminal:
    """Return the terminal of the current command."""
    return _CURRENT.get()


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, such as run_….")]
SpecArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[SPEC.yaml]",
        help="File with the spec; - for standard input.",
        show_default=False,
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


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command: errors become a message and an exit code, and global options may follow its
    name."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        terminal().as_json |= bool(kwargs.get("json_"))
        terminal().url = cast(str | None, kwargs.get("url")) or terminal().url
        try:
            function(*args, **kwargs)
        except EverstepError as exc:
            details: dict[str, Any] = {"code": exc.code, "status": exc.status}
            if isinstance(exc, InvalidSpec):
                details["errors"] = [
                    {"loc": list(fault.loc), "msg": fault.msg} for fault in exc.errors
                ]
            raise terminal().fail(_message(exc), exit_code_of(exc), details) from exc
        except KeyboardInterrupt as exc:
            raise typer.Exit(Exit.INTERRUPTED) from exc
        except BrokenPipeError as exc:
            # The reader closed the pipe. Python flushes stdout once more at exit: let that succeed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(Exit.SUCCEEDED) from exc
        except OSError as exc:
            raise terminal().fail(
                f"{exc.filename or 'this machine'}: {exc.strerror or exc}", Exit.FAILED
            ) from exc

    return guarded


def _message(error: EverstepError) -> str:
    if (
        isinstance(error, InvalidSpec)
        and error.errors
        and str(error) == "\n".join(map(str, error.errors))
    ):
        count = len(error.errors)
        return f"the request has {count} fault{'s' if count > 1 else ''}:\n" + "\n".join(
            f"  {fault}" for fault in error.errors
        )
    return error.message
