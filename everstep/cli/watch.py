"""Show a run live: a progress bar on a terminal, plain lines in a pipe, events as JSON lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

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

from everstep.cli.terminal import Terminal
from everstep.client.runs import RunHandle
from everstep.spec.plain_text import printable
from everstep.text import events as event_words
from everstep.text import words
from everstep.wire import Event, RunStatus
from everstep.wire.events import EventKind

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
        line = None if self._is_old(event) else event_words.event(event)
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

    def _is_old(self, event: Event) -> bool:
        """Return whether an evaluation is from before a restart: ranks report those again."""
        return (
            event.kind == EventKind.EVALUATED and event.data.get("step", 0) <= self._restored_step
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


def watch(terminal: Terminal, run: RunHandle, events: Iterable[Event] | None = None) -> RunHandle:
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
