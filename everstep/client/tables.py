"""Histories of a run as tables of pandas, which is imported only here, and only when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from everstep.errors import UsageError

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

    from everstep.client.runs import RunHandle

Table = Literal["metrics", "events", "failures"]


def to_pandas(run: RunHandle, what: Table, max_points: int) -> DataFrame:
    """Return a history as a table. Raises UsageError."""
    try:
        import pandas
    except ImportError as exc:
        raise UsageError(
            "to_pandas needs pandas, which is not installed; pip install pandas"
        ) from exc
    if what == "metrics":
        return _metrics(pandas, run, max_points)
    if what == "events":
        return _rows(pandas, [event.model_dump() for event in run.events()], "seq")
    if what == "failures":
        return _rows(pandas, [failure.model_dump() for failure in run.failures()], None)
    raise UsageError(f"{what!r} is not a table of a run; use one of {', '.join(get_args(Table))}")


def _metrics(pandas: Any, run: RunHandle, max_points: int) -> DataFrame:
    """Return a row for each step; of a step that was repeated, the value that counts."""
    series = run.metrics(max_points=max_points)
    columns = {
        name: pandas.Series({step: value for step, _, value in points}, dtype="float64")
        for name, points in sorted(series.items())
    }
    at = {step: seconds for points in series.values() for step, seconds, _ in points}
    table = pandas.DataFrame(columns)
    table.insert(
        0, "at", pandas.to_datetime(pandas.Series(at, dtype="float64"), unit="s", utc=True)
    )
    table.index.name = "step"
    return table.sort_index()


def _rows(pandas: Any, rows: list[dict[str, Any]], index: str | None) -> DataFrame:
    table = pandas.DataFrame.from_records(rows)
    return table.set_index(index) if index is not None and len(rows) else table
