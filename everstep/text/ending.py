"""Say how a run ended."""

from __future__ import annotations

from everstep.text import losses
from everstep.text.words import count, duration, numbers, usage_parts, where
from everstep.wire import Run


def summary(run: Run) -> str:
    """Return how a run ended: a line, and a second one for its reason."""
    parts = [where(run)]
    if run.finished_at is not None:
        parts.append(f"after {duration((run.finished_at - run.created_at).total_seconds())}")
    text = " ".join(parts)
    validation = {name: value for name, value in run.metrics.items() if name.startswith("val_")}
    if validation:
        text += f": {numbers(validation)}"
    text += f"; {count(run.restarts, 'restart')}, {losses.of_run(run)}"
    if used := usage_parts(run.usage):
        text += f"; {', '.join(used)}"
    if run.reason is not None:
        text += f"\n{run.reason.code}: {run.reason.message}"
    return text
