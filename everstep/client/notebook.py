"""Runs in a notebook: how they show themselves, and their curves as a plot."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from everstep.errors import UsageError
from everstep.text import failure, words
from everstep.wire import Run

_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top"


def run_html(run: Run) -> str:
    """Return the run as HTML. Text from users is escaped."""
    name, page = escape(run.name), run.links.dashboard or ""
    title = (
        f'<a href="{escape(page, quote=True)}">{name}</a>'
        if page.startswith(("http://", "https://"))
        else name
    )
    rows = [
        ("run", f"{title} <code>{escape(run.id)}</code>"),
        ("status", _status(run)),
        ("steps", _progress(run)),
    ]
    if run.world_size is not None:
        rows.append(("ranks", str(run.world_size)))
    if run.metrics:
        shown = ", ".join(
            f"{escape(metric)} {value:.5g}" for metric, value in sorted(run.metrics.items())[:8]
        )
        rows.append(("metrics", shown))
    if run.restarts:
        rows.append(("restarts", f"{run.restarts}, {failure.of_run(run)}"))
    cells = "".join(
        f'<tr><th style="{_CELL}">{what}</th><td style="{_CELL}">{text}</td></tr>'
        for what, text in rows
    )
    return f"<table>{cells}</table>"


def _status(run: Run) -> str:
    return f"<b>{run.status.value}</b>" + (f" {escape(run.reason.message)}" if run.reason else "")


def _progress(run: Run) -> str:
    if not run.total_steps:
        return words.progress(run)
    return (
        f'<progress value="{run.step}" max="{run.total_steps}"></progress> {run.step} of '
        f"{run.total_steps}"
    )


# ---------------------------------------------------------------- plot

# Curves of a run with matplotlib, which is imported only here, and only when asked for.


def plot(
    run: Run, read: Callable[[], dict[str, list[Any]]], names: tuple[str, ...], ax: Any
) -> Any:
    """Draw the metrics that ``read`` returns over steps; return the axes. Raises UsageError."""
    try:
        from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]
    except ImportError as exc:
        raise UsageError(
            "plot needs matplotlib, which is not installed; pip install matplotlib"
        ) from exc
    series = read()
    missing = [name for name in names if not series.get(name)]
    if missing or not any(series.values()):
        known = ", ".join(sorted(run.metrics)) or "none yet"
        wanted = ", ".join(missing) or "metrics"
        raise UsageError(f"run {run.id} has no values of {wanted} (it has: {known})")
    if ax is None:
        _, ax = pyplot.subplots()
    for name, points in sorted(series.items()):
        steps = [step for step, _, _ in points]
        values = [float("nan") if value is None else value for _, _, value in points]
        ax.plot(steps, values, label=name)
    ax.set_xlabel("step")
    ax.set_title(run.name)
    ax.legend()
    return ax
