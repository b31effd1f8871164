"""Curves of a run with matplotlib, which is imported only here, and only when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.errors import UsageError

if TYPE_CHECKING:
    from everstep.client.runs import RunHandle


def plot(run: RunHandle, names: tuple[str, ...], ax: Any) -> Any:
    """Draw metrics over steps; return the axes. Raises UsageError."""
    try:
        from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]
    except ImportError as exc:
        raise UsageError(
            "plot needs matplotlib, which is not installed; pip install matplotlib"
        ) from exc
    series = run.metrics(*names)
    missing = [name for name in names if not series.get(name)]
    if missing or not any(series.values()):
        known = ", ".join(sorted(run.run.metrics)) or "none yet"
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
