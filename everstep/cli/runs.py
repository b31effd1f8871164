"""Commands about runs: list, show, watch, cancel, pause, resume."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from everstep.cli.terminal import (
    Columns,
    Exit,
    RunArgument,
    RunsArgument,
    Said,
    Terminal,
    command,
    exit_code_of_status,
    statuses,
    terminal,
)
from everstep.client.runs import RunHandle
from everstep.errors import UsageError
from everstep.spec.plain_text import printable, printable_lines
from everstep.text import events as event_words
from everstep.text import words
from everstep.text.events import summary
from everstep.wire import Event, Run, RunStatus
from everstep.wire.events import EventKind


@command(
    Columns[Run](
        (
            *("id", "name", "status", "step", "left", "ranks", "loss"),
            *("created", "owner", "reason"),
        ),
        lambda run: (
            run.id,
            run.name,
            run.status,
            words.progress(run),
            words.time_left(run),
            run.world_size,
            words.number(run.metrics["loss"]) if "loss" in run.metrics else None,
            words.ago(run.created_at),
            run.owner,
            run.reason.code if run.reason else None,
        ),
        empty="no runs",
        text=("name", "owner", "reason"),
        dispensable=("reason", "owner", "created", "ranks", "loss", "left", "step"),
    )
)
def runs(
    status: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATUS",
            help="Only runs with this status, for example RUNNING. Repeatable.",
            autocompletion=statuses,
        ),
    ] = None,
    project: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only runs of this project.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only runs with this name.")
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only runs with this tag. Repeatable."),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Sort by this, for example name, spec.optimizer.lr or, with a minus the largest "
            "first, -metrics.val_accuracy.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Maximum number of runs.")
    ] = 50,
) -> list[Run]:
    """List runs, newest first."""
    found = (
        terminal().client().runs.list(status=status, project=project, name=name, tag=tag, sort=sort)
    )
    return [run.run for run in itertools.islice(found, limit)]


@command()
def watch(run_id: RunArgument) -> None:
    """Show a run until it ends. Exit code 0 for SUCCEEDED, 1 for FAILED or CANCELLED."""
    watch_to_the_end(terminal().client().runs.get(run_id))


def watch_to_the_end(run: RunHandle) -> None:
    out = terminal()
    if not out.as_json:
        out.note(f"{run.id} ({run.name})")
    ended = watch_run(out, run).run
    code = exit_code_of_status(ended.status)
    if out.as_json:
        out.json(ended)
    else:
        for line in summary(ended).splitlines():
            out.sentence(line, style=words.STATUS_STYLES[ended.status])
        if code != Exit.SUCCEEDED and ended.restarts + (ended.status == "FAILED"):
            out.note(
                f"`everstep why {ended.id}` shows its failures, `everstep logs {ended.id}` its logs"
            )
    if code != Exit.SUCCEEDED:
        raise typer.Exit(code)


@command()
def cancel(run_id: RunArgument) -> Said:
    """Stop a run for good, after a last checkpoint."""
    return _now(terminal().client().runs.get(run_id).cancel().run)


@command()
def pause(run_id: RunArgument) -> Said:
    """Stop a run after a checkpoint, and release its resources."""
    return _now(terminal().client().runs.get(run_id).pause().run)


@command()
def resume(run_id: RunArgument) -> Said:
    """Queue a paused run again; it continues from its last checkpoint."""
    return _now(terminal().client().runs.get(run_id).resume().run)


def _now(run: Run) -> Said:
    return Said(run, [f"{run.id} {printable(run.name)} is {run.status}"])


@command()
def note(
    run_id: RunArgument,
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="[TEXT]",
            help="The notes, which replace earlier ones; - for standard input; "
            "without it the notes are printed.",
            show_default=False,
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove the notes.")] = False,
) -> Said:
    """Print, replace or remove the notes of a run."""
    if clear and text is not None:
        raise UsageError("give either a text or --clear, not both")
    run = terminal().client().runs.get(run_id)
    if clear or text is not None:
        run.set_notes(None if clear else sys.stdin.read() if text == "-" else text)
    return Said(run.run, printable_lines(run.notes).split("\n") if run.notes else ())


@command()
def delete(
    run_ids: RunsArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete runs that have ended, with their checkpoints, logs and history. This cannot be
    undone."""
    out = terminal()
    found = [out.client().runs.get(run_id) for run_id in dict.fromkeys(run_ids)]
    if not yes:
        _confirm_delete(out, found)
    for run in found:
        run.delete()
        Said({"deleted": run.id}, [f"{run.id} {printable(run.name)} is deleted"]).print()


def _confirm_delete(out: Terminal, runs: list[RunHandle]) -> None:
    """Ask whether to delete these runs. Raise UsageError where nobody can answer."""
    if not (sys.stdin.isatty() and out.is_interactive):
        raise UsageError("deleting cannot be undone; add --yes to do it without a question")
    for run in runs:
        out.line(f"{run.id} {run.name} {run.status}, {words.progress(run.run)} steps")
    what = "this run" if len(runs) == 1 else f"these {len(runs)} runs"
    typer.confirm(f"Delete {what} with every checkpoint and log?", abort=True, err=True)


# ---------------------------------------------------------------- watch

# Show a run live: a progress bar on a terminal, plain lines in a pipe, events as JSON lines.

_LINE_EVERY_S = 5.0
_SHOWN = ("loss", "val_accuracy")
_WIDE_CHARS = 120
_NAME_CHARS = 20
"""Longest name of a run on a narrower terminal."""


class _StatusColumn(ProgressColumn):
    """The run's status in colour."""

    def render(self, task: Task) -> Text:
        status = RunStatus(task.fields["status"])
        return Text(f"{status:<10}", style=words.STATUS_STYLES[status])


class Watcher:
    """Shows a run from its events: call ``show`` with each. A context manager."""

    def __init__(self, terminal: Terminal, run: RunHandle) -> None:
        self._terminal = terminal
        self._status = RunStatus.QUEUED
        self._step = 0
        self._restored_step = -1
        self._total: int | None = None
        self._metrics: dict[str, float | None] = {}
        self._said_at = time.monotonic()
        self._said_step = -1
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if terminal.is_interactive:
            name = printable(run.name)
            whole, cut = Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis")
            is_wide = terminal.out.width >= _WIDE_CHARS
            self._progress = Progress(
                _StatusColumn(table_column=whole),
                TextColumn("{task.description}", table_column=cut),
                BarColumn(bar_width=30 if is_wide else 8),
                MofNCompleteColumn(table_column=whole),
                TextColumn("{task.fields[metrics]}", markup=False, table_column=cut),
                *([TimeRemainingColumn(compact=True)] if is_wide else []),
                console=terminal.out,
            )
            self._task = self._progress.add_task(
                Text(name if is_wide else name[:_NAME_CHARS]).markup,
                total=run.total_steps,
                status=self._status,
                metrics="",
            )

    def __enter__(self) -> Watcher:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, event: Event) -> None:
        """Process one event and show what changed."""
        if self._terminal.as_json:
            self._terminal.json(event)
            return
        self._take(event)
        is_evaluation = event.kind == EventKind.EVALUATED
        is_old = is_evaluation and event.data.get("step", 0) <= self._restored_step
        line = None if is_old else event_words.event(event)  # ranks report those again
        if line is not None:
            self.say(line, event)
        if self._progress is not None:
            self._progress.update(
                self._task,
                completed=self._step,
                total=self._total,
                status=self._status,
                metrics=words.numbers(self._metrics),
            )
        elif (
            line is None
            and time.monotonic() - self._said_at >= _LINE_EVERY_S
            and self._step != self._said_step
        ):
            self.say(
                f"step {self._step}/{self._total or '?'}: {words.numbers(self._metrics)}", event
            )

    def say(self, line: str, event: Event | None = None) -> None:
        """Print one line above the progress bar."""
        self._said_at, self._said_step = time.monotonic(), self._step
        stamp = event.at.astimezone().strftime("%H:%M:%S  ") if event is not None else ""
        self._terminal.sentence(
            stamp + line, style="bold yellow" if event and event.kind in _ALARMS else None
        )

    def _take(self, event: Event) -> None:
        data: dict[str, Any] = event.data
        match event.kind:
            case EventKind.STATUS:
                with contextlib.suppress(ValueError):  # a status that only a newer service has
                    self._status = RunStatus(data["to"])
            case EventKind.TRAINING_STARTED:
                self._total = data.get("total_steps") or self._total
            case EventKind.RESTORED:
                self._step = self._restored_step = data.get("step") or 0
            case EventKind.METRICS:
                for point in data.get("points") or ():
                    self._step = point["step"]
                    self._metrics |= {
                        name: value for name, value in point["values"].items() if name in _SHOWN
                    }
            case EventKind.EVALUATED:
                self._metrics |= {
                    name: value
                    for name, value in (data.get("metrics") or {}).items()
                    if name in _SHOWN
                }


_ALARMS = frozenset({EventKind.FAILURE, EventKind.CHECKPOINT_FAILED, EventKind.SNAPSHOTS})


def watch_run(
    terminal: Terminal, run: RunHandle, events: Iterable[Event] | None = None
) -> RunHandle:
    """Show a run until it has ended; return its final state. Ctrl-C stops watching, not the run."""
    try:
        with Watcher(terminal, run) as watcher:
            for event in run.events(follow=True) if events is None else events:
                watcher.show(event)
    except KeyboardInterrupt:
        terminal.note(
            f"the run continues; `everstep watch {run.id}` shows it again, `everstep cancel "
            f"{run.id}` stops it"
        )
        raise
    return run.refresh()
