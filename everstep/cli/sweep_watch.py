"""A sweep while it runs, a line for each change."""

from __future__ import annotations

import typer

from everstep.cli.terminal import Exit, terminal
from everstep.client.sweeps import SweepHandle
from everstep.text import words
from everstep.wire.sweep import Sweep, SweepProgress, SweepStatus


def watch_to_the_end(found: SweepHandle) -> None:
    """Print a line whenever something changes, until the sweep ends."""
    out, before = terminal(), ""
    while True:
        line = progress_line(found.sweep)
        if line != before and not out.as_json:
            out.line(line)
        before = line
        if found.status.terminal:
            break
        found.wait_for_change()
    if out.as_json:
        out.json(found.sweep)
    elif found.reason is not None:
        out.sentence(found.reason.message)
    if found.status is not SweepStatus.SUCCEEDED:
        raise typer.Exit(Exit.FAILED)


def progress_line(found: Sweep) -> str:
    """Return the status of a sweep, the states of its runs, and its best value."""
    best = f" · best {found.metric} {words.number(found.best.value)}" if found.best else ""
    return f"{found.status}: {states_of_runs(found.progress)}{best}"


def states_of_runs(progress: SweepProgress) -> str:
    """Return how many runs have each state: ``1 active, 2 succeeded``."""
    states = ("waiting", "active", "paused", "succeeded", "failed", "cancelled")
    numbers = {name: getattr(progress, name) for name in states}
    return ", ".join(f"{number} {name}" for name, number in numbers.items() if number)
