"""Output of the CLI (tables, plain lines, JSON), and how errors become exit codes."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Generic, TypeVar

import typer
from pydantic_core import to_jsonable_python
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

T = TypeVar("T")
CLI_TRIES = 4
_LEAST_CHARS = 12
"""Width down to which a column of text may be squeezed."""
_GAP_CHARS = 3
"""Between two columns of a table."""


class Exit(IntEnum):
    """Exit codes of the CLI."""

    SUCCEEDED = 0
    FAILED = 1
    """The run ended FAILED or CANCELLED, or the request failed on the service or this machine."""
    USAGE = 2
    """Wrong usage, an invalid spec, or a request that the service refuses."""
    UNREACHABLE = 3
    INTERRUPTED = 130
    READER_GONE = 141
    """Whoever read the output went away, as ``head`` does. A shell's own programs end so by
    SIGPIPE."""


_EXIT_OF: tuple[tuple[type[EverstepError], Exit], ...] = (
    (Unavailable, Exit.UNREACHABLE),
    (RateLimited, Exit.UNREACHABLE),
    *((kind, Exit.USAGE) for kind in (UsageError, InvalidSpec, AuthError, NotFound, Conflict)),
    (EverstepError, Exit.FAILED),
)


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

    def sentence(self, text: str, style: str | None = None) -> None:
        """Print a line that a terminal breaks between words only."""
        self.out.print(Text("\n".join(self._folded(printable(text), 0)), style=style or ""))

    def note(self, text: str) -> None:
        """Print one line to standard error, beside the output proper."""
        self.err.print(Text("\n".join(self._folded(printable(text), 0)), style="dim"))

    def json(self, value: Any) -> None:
        """Print one value as one line of JSON."""
        sys.stdout.write(json_line(to_jsonable_python(value)) + "\n")
        sys.stdout.flush()

    def table(
        self,
        headers: Sequence[str],
        rows: Iterable[Sequence[object]],
        empty: str,
        *,
        text: Collection[str] = (),
        dispensable: Sequence[str] = (),
    ) -> None:
        """Print rows below headers. In a pipe the columns are plain and never cut.

        Args:
            headers: one for each column.
            rows: the cells.
            empty: what to print if there are no rows.
            text: columns that may be folded on a narrow terminal; ids and states never are.
            dispensable: columns that a narrow terminal leaves out, the first one first. A table
                that does not fit without them is printed row by row, with a line for each cell.
        """
        cells = [[printable("-" if cell is None else str(cell)) for cell in row] for row in rows]
        if not cells:
            self.note(empty)
        elif self.is_interactive:
            left_out = _left_out(self.out.width, headers, cells, text, dispensable)
            if left_out is None:
                for row in cells:
                    self.fields(zip(headers, row, strict=True))
                    self.line()
                return
            table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
            for header in headers:
                if header not in left_out:
                    table.add_column(header, overflow="fold", no_wrap=header not in text)
            for row in cells:
                named = zip(headers, row, strict=True)
                table.add_row(*(Text(cell) for header, cell in named if header not in left_out))
            self.out.print(table, soft_wrap=False)
            if left_out:
                self.note(f"not shown on this narrow terminal: {', '.join(left_out)}")
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
            lines = self._folded(printable(value), width + 2)
            self.out.print(
                Text.assemble(
                    (name.ljust(width), "bold"), "  ", f"\n{' ' * (width + 2)}".join(lines)
                )
            )

    def _folded(self, text: str, indent: int) -> list[str]:
        """Return a text in lines that fit a terminal beside an indent, broken between words."""
        if not self.is_interactive:
            return [text]
        return textwrap.wrap(
            text,
            max(_LEAST_CHARS, self.out.width - indent),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]

    def fail(self, message: str, code: Exit, details: dict[str, Any] | None = None) -> typer.Exit:
        """Print an error to standard error; return the exception to raise."""
        if self.as_json:
            sys.stderr.write(json_line({"error": {"message": message, **(details or {})}}) + "\n")
        else:
            self.err.print(Text.assemble(("error: ", "bold red"), printable_lines(message)))
        return typer.Exit(code)


def _left_out(
    width: int,
    headers: Sequence[str],
    cells: Sequence[Sequence[str]],
    text: Collection[str],
    dispensable: Sequence[str],
) -> list[str] | None:
    """Return the columns to leave out so that a table of this width breaks no word but of
    ``text``; None if nothing helps."""
    needed = {
        header: max(len(header), *(len(row[column]) for row in cells))
        for column, header in enumerate(headers)
    }
    for header in text:
        needed[header] = min(needed[header], max(_LEAST_CHARS, len(header)))
    for number in range(len(dispensable) + 1):
        left_out = list(dispensable[:number])
        shown = [chars for header, chars in needed.items() if header not in left_out]
        if sum(shown) + _GAP_CHARS * len(shown) <= width:
            return left_out
    return None


_CURRENT: ContextVar[Terminal] = ContextVar("terminal")


def begin(as_json: bool, url: str | None) -> None:
    """Start a command line, with the options before the command's name."""
    _CURRENT.set(Terminal(as_json, url))


def terminal() -> Terminal:
    """Return the terminal of the current command."""
    return _CURRENT.get()


@dataclass(frozen=True)
class Said:
    """What a command did: a value for ``--json``, lines, and notes beside them."""

    value: Any = None
    lines: Sequence[str] = ()
    notes: Sequence[str] = ()

    def print(self) -> None:
        """Print the value or the lines and notes."""
        out = terminal()
        if not out.as_json:
            for line in self.lines:
                out.line(line)
            for note in self.notes:
                out.note(note)
        elif self.value is not None:
            out.json(self.value)


@dataclass(frozen=True)
class Columns(Generic[T]):
    """How what a command found is shown as a table, a row for each; see ``Terminal.table``."""

    headers: Sequence[str]
    row: Callable[[T], Sequence[object]]
    empty: str = ""
    text: Collection[str] = ()
    dispensable: Sequence[str] = ()

    def __call__(self, found: Iterable[T]) -> None:
        """Print the table."""
        terminal().table(
            self.headers,
            map(self.row, found),
            self.empty,
            text=self.text,
            dispensable=self.dispensable,
        )


def command(
    show: Callable[[T], None] | None = None,
    *,
    options: tuple[str, ...] = ("json_", "url"),
    ends: Callable[[T], Exit] = lambda _found: Exit.SUCCEEDED,
) -> Callable[[Callable[..., T | Said | None]], Callable[..., None]]:
    """Make a command of a function that returns what it found.

    ``--json`` prints that as JSON, an iterator one value a line. Else ``show`` prints it. Errors
    become a message and an exit code.

    Args:
        show: prints what was found; a command that returns Said or None has none.
        options: of every command, may follow its name.
        ends: returns the exit code for what was found.
    """

    def decorate(function: Callable[..., T | Said | None]) -> Callable[..., None]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            given = {name: kwargs.pop(name) for name in options}
            terminal().as_json |= bool(given.get("json_"))
            terminal().url = given.get("url") or terminal().url
            with _errors_to_exit_codes():
                found = function(*args, **kwargs)
                if isinstance(found, Said):
                    found.print()
                elif found is not None:
                    print_found(found, show)
                    if code := ends(found):
                        raise typer.Exit(code)

        own = inspect.signature(function, eval_str=True).parameters.values()
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for name, default, annotation in _EVERYWHERE
            if name in options
        ]
        parameters = [*own, *added]
        guarded.__annotations__ = {each.name: each.annotation for each in parameters}
        guarded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return guarded

    return decorate


def print_found(found: T, show: Callable[[T], None] | None) -> None:
    """Print what was found, as JSON if that is wanted."""
    if not terminal().as_json:
        if show is not None:
            show(found)
    elif isinstance(found, Iterator):
        for each in list(found):  # all of it is there before the first line is printed
            terminal().json(each)
    else:
        terminal().json(found)


@contextmanager
def _errors_to_exit_codes() -> Iterator[None]:
    """Print an error as a message, and end with its exit code."""
    try:
        yield
    except EverstepError as exc:
        details: dict[str, Any] = {"code": exc.code, "status": exc.status}
        if isinstance(exc, InvalidSpec):
            details["errors"] = [{"loc": list(fault.loc), "msg": fault.msg} for fault in exc.errors]
        code = next(code for kind, code in _EXIT_OF if isinstance(exc, kind))
        raise terminal().fail(_message(exc), code, details) from exc
    except KeyboardInterrupt as exc:
        raise typer.Exit(Exit.INTERRUPTED) from exc
    except BrokenPipeError as exc:
        # The reader closed the pipe. Python flushes stdout once more at exit: let that succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(Exit.READER_GONE) from exc
    except OSError as exc:
        raise terminal().fail(
            f"{exc.filename or 'this machine'}: {exc.strerror or exc}", Exit.FAILED
        ) from exc


def _message(error: EverstepError) -> str:
    if (
        isinstance(error, InvalidSpec)
        and error.errors
        and str(error) == "\n".join(map(str, error.errors))
    ):
        count = len(error.errors)
        what = "spec" if error.code == InvalidSpec.code else "request"
        return f"the {what} has {count} fault{'s' if count > 1 else ''}:\n" + "\n".join(
            f"  {fault}" for fault in error.errors
        )
    return error.message


# ---------------------------------------------------------------- completion

# What the shell offers after Tab: ids of runs, statuses. It completes files by itself.

_TIMEOUT_S = 2.0
_MOST = 50


def run_ids(incomplete: str) -> list[tuple[str, str]]:
    """Return the newest runs whose id begins so, each with its name and status. Nothing is offered
    while the service does not answer."""
    try:
        with Client(timeout_s=_TIMEOUT_S, max_tries=1) as client:
            newest = list(itertools.islice(client.runs.list(), _MOST))
    except EverstepError:
        return []
    return [
        (each.id, printable(f"{each.name} {each.status}"))
        for each in newest
        if each.id.startswith(incomplete)
    ]


def statuses(incomplete: str) -> list[str]:
    """Return the statuses that begin so."""
    return [status for status in RunStatus if status.startswith(incomplete.upper())]


# ---------------------------------------------------------------- options

# Arguments and options that several commands of the CLI share.

RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Id of the run, such as run_….", autocompletion=run_ids),
]
RunsArgument = Annotated[
    list[str],
    typer.Argument(metavar="RUN…", help="Ids of runs.", autocompletion=run_ids),
]
SpecArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[SPEC.yaml]",
        help="File with the spec; - for standard input.",
        show_default=False,
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
TrainFnOption = Annotated[
    str | None,
    typer.Option("--train-fn", metavar="MODULE:FUNCTION", help="Ray Train function in the code."),
]
ScriptOption = Annotated[
    str | None,
    typer.Option(
        "--script",
        metavar="FILE.py",
        help="Script in the code, as for torchrun; its arguments follow --. "
        "`-m pkg.train` runs a module.",
    ),
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
_EVERYWHERE = (("json_", False, JsonOption), ("url", None, UrlOption))
"""Options of every command: the parameter, its default and its type."""
