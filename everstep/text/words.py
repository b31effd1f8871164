"""Format amounts, durations and the state of a run for people."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from everstep.wire import FirstStart, Run, RunStatus, Usage
from everstep.wire.run import Replay

STATUS_STYLES: Mapping[RunStatus, str] = {
    RunStatus.QUEUED: "cyan",
    RunStatus.STARTING: "cyan",
    RunStatus.RUNNING: "bold green",
    RunStatus.RECOVERING: "bold yellow",
    RunStatus.STOPPING: "yellow",
    RunStatus.PAUSED: "magenta",
    RunStatus.SUCCEEDED: "green",
    RunStatus.FAILED: "bold red",
    RunStatus.CANCELLED: "red",
}


_COLOURS = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")
"""Sequences by which programs colour a terminal, move its cursor or set its title."""


def without_colours(text: str) -> str:
    """Return a text without the sequences that colour a terminal."""
    return _COLOURS.sub("", text)


def size(num_bytes: float) -> str:
    """Return a size: ``3.4 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """Return a duration: ``1.3 s``, ``4 min 5 s``, ``3 h 12 min``, ``2 d 5 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def ago(at: datetime | None, now: datetime | None = None) -> str | None:
    """Return how long ago a time was: ``5.0 s ago``."""
    return (
        None
        if at is None
        else f"{duration(max(0.0, ((now or datetime.now(UTC)) - at).total_seconds()))} ago"
    )


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def numbers(values: Mapping[str, Any]) -> str:
    """Return named values: ``loss 0.1234, val_accuracy 0.98``."""
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def speed(metrics: Mapping[str, float]) -> str | None:
    """Return how fast a run trains, as far as its newest metrics say: ``310 samples/s, 4,960
    tokens/s, 41.0 % MFU, 3 % of a step waiting for data``; None if they do not."""
    found = []
    for name, unit in (
        ("samples_per_s", "samples/s"),
        ("tokens_per_s", "tokens/s"),
        ("tflops_per_s", "TFLOP/s"),
    ):
        if (value := metrics.get(name)) is not None:
            found.append(f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}")
    shares = (("mfu", "{:.1f} % MFU"), ("data_wait", "{:.0f} % of a step waiting for data"))
    for name, text in shares:
        value = metrics.get(name)
        if value is not None and 0 <= value <= 1:  # else it is a figure of the user's own
            found.append(text.format(100 * value))
    return ", ".join(found) or None


def count(amount: int, noun: str) -> str:
    """Return a count with its noun: ``1 step``, ``2 steps``."""
    return f"{amount} {noun}{'' if amount == 1 else 's'}"


def has_no_steps(run: Run) -> bool:
    """Return whether a run has trained without reporting a step: a user's script may report
    none."""
    has_begun = run.status == RunStatus.SUCCEEDED or run.guarantee is not None
    return has_begun and not run.step and run.total_steps is None


def progress(run: Run) -> str:
    """Return the steps done, of those in all if that is known: ``8/40``."""
    if has_no_steps(run):
        return "none reported"
    return f"{run.step}/{run.total_steps}" if run.total_steps is not None else str(run.step)


def where(run: Run) -> str:
    """Return a run's status and step: ``RUNNING at step 8/40``; without a step that is not
    reported."""
    return run.status if has_no_steps(run) else f"{run.status} at step {progress(run)}"


def headline(run: Run) -> str:
    """Return how far a run is, how fast, how long still, its loss, its time and what it used.

    What is not known is left out: ``18 % · 3.4 steps/s · 2 min 5 s left · loss 0.076 · 1 min 3 s
    elapsed · 0.06 CPU-h``.
    """
    return " · ".join(headline_parts(run))


def headline_parts(run: Run) -> list[str]:
    """Return the parts of ``headline``."""
    parts = []
    if run.progress is not None:
        if run.progress.fraction is not None:
            parts.append(f"{math.floor(100 * run.progress.fraction)} %")
        if run.progress.steps_per_s is not None:
            parts.append(pace(run.progress.steps_per_s))
        if run.progress.eta_s is not None:
            parts.append(f"{duration(run.progress.eta_s)} left")
    if "loss" in run.metrics:
        parts.append(f"loss {number(run.metrics['loss'])}")
    if run.progress is not None:
        parts.append(f"{duration(run.progress.elapsed_s)} elapsed")
    return [*parts, *usage_parts(run.usage)]


def time_left(run: Run) -> str | None:
    """Return how long a run still takes at its pace; None if that is not known."""
    if run.progress is None or run.progress.eta_s is None:
        return None
    return duration(run.progress.eta_s)


def pace(steps_per_s: float) -> str:
    """Return a speed: ``3.4 steps/s``; slower than one step in ten seconds: ``12.0 s/step``."""
    if steps_per_s >= 0.1:
        return f"{steps_per_s:.3g} steps/s"
    return f"{duration(1 / steps_per_s)}/step"


def usage_parts(usage: Usage | None) -> list[str]:
    """Return resources held and their price: ``0.06 CPU-h``, ``0.12 USD``; only what is known."""
    if usage is None:
        return []
    parts = [f"{hours:.3g} GPU-h" for hours in (usage.gpu_h,) if hours]
    parts += [f"{hours:.3g} CPU-h" for hours in (usage.cpu_h,) if hours]
    if usage.cost is not None:
        parts.append(f"{usage.cost:.2f} {usage.currency}")
    return parts


_PARTS: Mapping[str, str] = {
    "queued_s": "queued",
    "job_s": "Ray job and driver",
    "ranks_s": "processes of the ranks",
    "model_s": "model and state",
    "data_s": "optimizer and data",
    "step_s": "first step",
}


def first_start(start: FirstStart) -> str:
    """Return how long a run took to its first step, and for what; empty if nothing is known."""
    known = {name: getattr(start, name) for name in _PARTS if getattr(start, name) is not None}
    parts = ", ".join(f"{_PARTS[name]} {duration(took)}" for name, took in known.items())
    if start.step_s is None:
        return parts
    return f"{duration(sum(known.values()))} after submission: {parts}"


def replay(found: Replay) -> str:
    """Return what a run trains again, and the result."""
    steps = f"steps {found.from_step + 1} to {found.to_step} of {found.run_id}"
    return f"{steps}: {found.message or 'no result yet'}"


# ---------------------------------------------------------------- close names

# Suggest the name that was meant. The work is bounded, however many and long the names are.

_LONGEST_CHARS = 100
_MOST_NAMES = 500


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the name most like ``name``; None if none is close, or ``name`` is too long.

    >>> closest("epohcs", ["epochs", "max_steps"])
    'epochs'
    """
    if len(name) > _LONGEST_CHARS:
        return None
    near = (
        each
        for each in islice(names, 100 * _MOST_NAMES)
        if abs(len(each) - len(name)) <= len(name) // 2 + 1
    )
    found = difflib.get_close_matches(name, islice(near, _MOST_NAMES), n=1)
    return found[0] if found else None


# ---------------------------------------------------------------- differences

# Compare specs field by field.


def leaves(value: Any, path: str = "") -> dict[str, str]:
    """Return every leaf of a JSON value by its path, as JSON: ``{"train.epochs": "5"}``. An empty
    object or list is a leaf."""
    if isinstance(value, Mapping) and value:
        return {
            name: text
            for key, item in value.items()
            for name, text in leaves(item, f"{path}.{key}" if path else key).items()
        }
    return {path: json.dumps(value, ensure_ascii=False)}


def differences(specs: list[dict[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Return the paths at which the specs differ, with each spec's value; None if it has none.
    Names are left out."""
    flat = [leaves(spec) for spec in specs]
    paths = dict.fromkeys(path for spec in flat for path in spec)
    rows = [(path, [spec.get(path) for spec in flat]) for path in paths if path != "name"]
    return [(path, values) for path, values in rows if len(set(values)) > 1]
