"""The values behind curves as a table to download: every point, however long the series."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from service.api.auth import visible_run
from service.api.context import ApiContext, Context
from service.api.problems import invalid_request
from service.model.rows import METRIC_NAME_CHARS, MetricPoint
from service.model.run_rows import RunRow
from service.web.compare_page import MOST_RUNS
from service.web.rendering import PageRoute
from service.web.session import WebCaller

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

_MOST_NAMES: Final = 200
_BATCH_POINTS: Final = 5000
_HEAD: Final = ("run_id", "run", "metric", "step", "time", "value")


@router.get("/curves.csv")
async def get_table(
    context: Context,
    caller: WebCaller,
    run: Annotated[list[str], Query()],
    name: Annotated[list[str], Query()],
) -> StreamingResponse:
    """Return every value of these metrics of these runs, a row for each; empty where it was not
    finite."""
    ids, names = list(dict.fromkeys(run)), list(dict.fromkeys(name))
    if len(ids) > MOST_RUNS or len(names) > _MOST_NAMES:
        raise invalid_request(
            "run", msg=f"ask for at most {MOST_RUNS} runs and {_MOST_NAMES} names"
        )
    if any(len(each) > METRIC_NAME_CHARS for each in names):
        raise invalid_request("name", msg="is not the name of a metric")
    rows = [await visible_run(run_id, context, caller) for run_id in ids]
    headers = {"Content-Disposition": 'attachment; filename="curves.csv"'}
    return StreamingResponse(
        _lines(context, rows, names), media_type="text/csv; charset=utf-8", headers=headers
    )


async def _lines(
    context: ApiContext, runs: Sequence[RunRow], names: Sequence[str]
) -> AsyncIterator[str]:
    yield _written([_HEAD])
    for run in runs:
        for name in names:
            step: int | None = -1
            while step is not None:
                points = await context.database_call(
                    context.series.behind, run.id, name, step, _BATCH_POINTS
                )
                yield _written([_row(run, point) for point in points])
                step = points[-1].step if len(points) == _BATCH_POINTS else None


def _row(run: RunRow, point: MetricPoint) -> tuple[str, ...]:
    at = datetime.fromtimestamp(point.at, UTC).isoformat(timespec="milliseconds")
    value = "" if point.value is None else repr(point.value)
    return run.id, run.name, _cell(point.name), str(point.step), at, value


def _cell(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _written(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()
