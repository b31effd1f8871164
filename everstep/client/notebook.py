"""Runs in a notebook: how they show themselves."""

from __future__ import annotations

from html import escape

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
