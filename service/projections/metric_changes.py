"""What steps, evaluations and ends of epochs change in a run's row."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from everstep.wire import RunStatus
from everstep.wire.metric_names import (
    MOST_SYSTEM_RANKS,
    SYSTEM_FIGURES,
    NameLimit,
    lookup,
    system_name,
    validation_name,
)
from service.model.rows import METRIC_NAME_CHARS, EventRow, MetricPoint
from service.model.run_rows import RunRow
from service.projections.changes import Changes, to_status
from storage.checkpoints.lineage import is_better


def metrics(run: RunRow, event: EventRow) -> Changes:
    points = event.data["points"]
    if not points:
        return Changes()
    latest = dict(run.metrics)
    limit = NameLimit(latest)
    rows = []
    for point in points:
        for full_name, value in point["values"].items():
            name = full_name[:METRIC_NAME_CHARS]
            if name not in limit.known and limit.refused([name]):
                continue
            rows.append(MetricPoint(name, int(point["step"]), float(point["at"]), value))
            if value is None:
                latest.pop(name, None)
            else:
                latest[name] = value
    step = int(points[-1]["step"])
    columns: dict[str, Any] = {"metrics": latest, "step": step}
    if (proof := points[-1].get("proof")) is not None:
        columns["chain"] = proof.get("chain")
    if run.started_at is None:
        columns["started_at"] = float(points[0]["at"])
    if run.steps_per_epoch:
        columns["epoch"] = _epoch_at(run, step // run.steps_per_epoch)
    return Changes(columns, points=tuple(rows), **to_status(run, RunStatus.RUNNING))


def evaluated(run: RunRow, event: EventRow) -> Changes:
    step, values = int(event.data["step"]), event.data["metrics"]
    named = {validation_name(name)[:METRIC_NAME_CHARS]: value for name, value in values.items()}
    best_metric = run.stored_spec.checkpoint.best_metric
    always = () if best_metric is None else (validation_name(best_metric),)
    for name in NameLimit(run.metrics).refused(list(named), always=always):
        del named[name]
    columns: dict[str, Any] = {
        "metrics": run.metrics | {name: value for name, value in named.items() if value is not None}
    }
    best = _better(run, step, values)
    if best is not None:
        columns["best"] = best
    return Changes(
        columns,
        points=tuple(MetricPoint(name, step, event.at, value) for name, value in named.items()),
    )


def _better(run: RunRow, step: int, values: dict[str, float | None]) -> dict[str, Any] | None:
    """Return the new best evaluation; None if the old one is still the best."""
    checkpoint = run.stored_spec.checkpoint
    metric = checkpoint.best_metric
    value = lookup(values, metric) if metric else None
    if value is None:
        return None
    if not is_better(value, run.best["value"] if run.best else None, checkpoint.best_mode):
        return None
    return {"metric": metric, "value": value, "step": step}


def epoch_completed(run: RunRow, event: EventRow) -> Changes:
    return Changes({"epoch": _epoch_at(run, int(event.data["epoch"]) + 1)})


def _epoch_at(run: RunRow, epoch: int) -> int:
    """Return the epoch in progress; the last one stays in progress to the end.

    A user's own loop is not bound by the spec's ``train.epochs``. Its own end is known once it has
    reported how many steps it makes.
    """
    if not run.stored_spec.runs_own_function:
        return min(epoch, run.stored_spec.train.epochs - 1)
    if not run.total_steps or not run.steps_per_epoch:
        return epoch
    return min(epoch, (run.total_steps - 1) // run.steps_per_epoch)


_GPU_FIGURES: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {
        "gpu_busy_percent": ("busy", 100.0),
        "gpu_used_bytes": ("used_bytes", 1.0),
        "gpu_power_w": ("power_w", 1.0),
        "gpu_celsius": ("celsius", 1.0),
    }
)
"""Series, and the field of ``gpu_use`` that it is made of, with a factor."""


def rank_use(run: RunRow, event: EventRow) -> Changes:
    figures = {name: event.data.get(name) for name in SYSTEM_FIGURES if name not in _GPU_FIGURES}
    return _system_points(run, event, figures)


def gpu_use(run: RunRow, event: EventRow) -> Changes:
    figures: dict[str, Any] = {}
    for name, (field, factor) in _GPU_FIGURES.items():
        value = event.data.get(field)
        figures[name] = None if value is None else value * factor
    return _system_points(run, event, figures)


def _system_points(run: RunRow, event: EventRow, figures: Mapping[str, Any]) -> Changes:
    """Return a point for each figure that is known, at the whole seconds since the run's
    creation: such a series outlives steps that are repeated, and those of a loop without any."""
    rank, second = int(event.data["rank"]), max(0, int(event.at - run.created_at))
    if not 0 <= rank < MOST_SYSTEM_RANKS:
        return Changes()
    return Changes(
        points=tuple(
            MetricPoint(system_name(name, rank), second, event.at, float(value))
            for name, value in figures.items()
            if value is not None
        )
    )
