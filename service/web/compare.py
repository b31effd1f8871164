"""Compare several runs: figures, differences of their specs, curves, and coordinates side by
side.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from everstep.spec.yaml_text import to_yaml
from everstep.text.words import differences, number
from everstep.wire import Run
from everstep.wire.events import PREFIX, mode_of, validation_name
from service.api import streams
from service.api.auth import visible_run
from service.api.blocking import db_read
from service.api.callers import Principal
from service.api.dependencies import Runs, Series, Streams
from service.api.problems import ApiProblem, invalid_request
from service.db.events import SeriesStore
from service.db.run_lookup import RunFilter
from service.db.runs import RunStore
from service.model.rows import METRIC_NAME_CHARS, MetricPoint
from service.model.run_rows import RunRow
from service.runs.routes import parse_order, parse_tag
from service.runs.views import Views
from service.web.new_run import again
from service.web.rendering import PageRoute, page
from service.web.run_page import Pages
from service.web.session import WebCaller, WebRun

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

MOST_RUNS: Final = 8
_MOST_LINES: Final = 100
"""Of parallel coordinates."""
_SUGGESTED: Final = 30
_LARGER_IS_BETTER: Final = re.compile(
    r"(accuracy|precision|recall|f1|auc|auroc|bleu|iou|dice)$|(^|[^a-z])(acc|map|r2|top[_-]?\d)$"
)
"""Names of metrics whose larger values are better, whatever is trained."""


@router.get("/compare")
async def get_comparison(
    request: Request,
    views: Views,
    caller: WebCaller,
    run: Annotated[list[str] | None, Query()] = None,
    tag: Annotated[str, Query(max_length=400)] = "",
    sort: Annotated[str, Query(max_length=400)] = "",
) -> Response:
    """Show the runs in ``run``, each once; or those with a tag, of which parallel coordinates show
    more than the curves."""
    ids = list(dict.fromkeys(run_id.strip() for run_id in run or () if run_id.strip()))
    if len(ids) > MOST_RUNS:
        raise ApiProblem(
            422,
            "invalid_request",
            f"Cannot compare {len(ids)} runs; choose at most {MOST_RUNS}.",
        )
    if tag:
        wanted = RunFilter(tags=(parse_tag(tag),))
        found = await views.found(caller, wanted, _MOST_LINES, order=parse_order(sort))
        by_id = await db_read(views.runs.rows, [each.id for each in found.items])
        every = tuple(each for each in found.items if each.id in by_id)
        specs = [by_id[each.id].spec for each in every]
    else:
        rows = [await visible_run(run_id, views.runs, caller) for run_id in ids]
        every, specs = tuple(await views.of(rows)), [row.spec for row in rows]
    runs = every[:MOST_RUNS]
    return page(
        request,
        "compare.html",
        caller,
        runs=runs,
        measured=_measured(runs, specs[:MOST_RUNS]),
        differences=differences(specs[:MOST_RUNS]),
        parallel=picture(every, specs),
        suggested=await suggested(views.runs, caller),
        most=MOST_RUNS,
    )


def _measured(
    runs: Sequence[Run], specs: Sequence[dict[str, Any]]
) -> list[tuple[str, list[tuple[str, bool] | None]]]:
    """Return a row for each metric, those of validation first: each run's value as text, and
    whether it is the best of several. Where better is not known, as of a learning rate, none is."""
    values: dict[str, list[float | None]] = {
        f"best {metric}": [run.best.value if run.best else None for run in runs]
        for metric in {run.best.metric for run in runs if run.best}
        if all(run.best is None or run.best.metric == metric for run in runs)
    }
    names = {name for run in runs for name in run.metrics}
    for name in sorted(names, key=lambda name: (not name.startswith(PREFIX), name)):
        values[name] = [run.metrics.get(name) for run in runs]
    rows = []
    for name, found in values.items():
        mode = _known_mode(name.removeprefix("best "), specs)
        known = [value for value in found if value is not None]
        is_judged = mode and len(known) > 1
        best = (min if mode == "min" else max)(known) if is_judged else math.nan
        texts = [None if each is None else (number(each), each == best) for each in found]
        rows.append((name, texts))
    return rows


def _known_mode(name: str, specs: Sequence[dict[str, Any]]) -> str | None:
    """Return whether smaller or larger values are better: as the specs say that name the metric, if
    they agree, or as its name says; None where neither does."""
    modes = {
        wanted["best_mode"]
        for wanted in (spec.get("checkpoint") or {} for spec in specs)
        if wanted.get("best_metric")
        and validation_name(wanted["best_metric"]) == validation_name(name)
    }
    if modes:
        return modes.pop() if len(modes) == 1 else None
    if mode_of(name) == "min":
        return "min"
    return "max" if _LARGER_IS_BETTER.search(name.lower()) else None


@router.get("/runs/{run_id}/spec")
async def get_spec(
    run: WebRun,
    pages: Pages,
    runs: Runs,
    caller: WebCaller,
    against: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """Show the resolved spec, and its differences from another run's."""
    other = await visible_run(against.strip(), runs, caller) if against.strip() else None
    return await pages.page(
        "spec.html",
        run,
        short=again(run),
        text=to_yaml(run.spec),
        other=other,
        differences=differences([run.spec, other.spec]) if other else [],
        suggested=[each for each in await suggested(runs, caller) if each.id != run.id],
    )


async def suggested(runs: RunStore, caller: Principal) -> list[RunRow]:
    """Return the newest runs that the caller can see, as suggestions to compare with."""
    return await db_read(runs.find, RunFilter(project=caller.project), _SUGGESTED)


# ---------------------------------------------------------------- curve table

# The values behind curves as a table to download: every point, however long the series.

_MOST_NAMES: Final = 200
_BATCH_POINTS: Final = 5000
_HEAD: Final = ("run_id", "run", "metric", "step", "time", "value")


@router.get("/curves.csv")
async def get_table(
    runs: Runs,
    series: Series,
    streamed: Streams,
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
    rows = [await visible_run(run_id, runs, caller) for run_id in ids]
    headers = {"Content-Disposition": 'attachment; filename="curves.csv"'}
    lines = _lines(series, rows, names)
    return streams.response(streamed, caller, lines, "text/csv; charset=utf-8", headers)


async def _lines(
    series: SeriesStore, runs: Sequence[RunRow], names: Sequence[str]
) -> AsyncGenerator[bytes]:
    yield _written([_HEAD])
    for run in runs:
        for name in names:
            step: int | None = -1
            while step is not None:
                points = await db_read(series.behind, run.id, name, step, _BATCH_POINTS)
                yield _written([_row(run, point) for point in points])
                step = points[-1].step if len(points) == _BATCH_POINTS else None


def _row(run: RunRow, point: MetricPoint) -> tuple[str, ...]:
    at = datetime.fromtimestamp(point.at, UTC).isoformat(timespec="milliseconds")
    value = "" if point.value is None else repr(point.value)
    is_formula = point.name[:1] in ("=", "+", "-", "@", "\t", "\r")  # to a spreadsheet
    name = f"'{point.name}" if is_formula else point.name
    return run.id, run.name, name, str(point.step), at, value


def _written(rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


# ---------------------------------------------------------------- parallel

# Parallel coordinates of several runs: an axis for each hyperparameter in which they differ and
# for each metric, a line for each run. Drawn on the server, so that it needs no script.

MOST_AXES: Final = 16
_LOG_RATIO: Final = 50.0
"""From this ratio of the largest value to the smallest on, an axis is logarithmic."""
_LEFT_OUT: Final = ("tags", "priority", "project", "resume_from", "env", "notify")
_DIGEST: Final = re.compile(r"\b[0-9a-f]{32,}\b")
"""A digest, as that of ``code.archive``, says nothing on an axis."""
_AXIS_PX: Final = 130
_TOP_PX, _HEIGHT_PX, _BOTTOM_PX = 46, 220, 14
_MARGIN_PX: Final = 70
_LABEL_CHARS: Final = 18


@dataclass(frozen=True)
class Tick:
    y: float
    text: str


@dataclass(frozen=True)
class Axis:
    """One vertical axis."""

    title: str
    full_title: str
    x: float
    ticks: tuple[Tick, ...]
    places: tuple[float | None, ...]
    """Height of each run's value in pixels; None where it has none."""
    texts: tuple[str | None, ...]


@dataclass(frozen=True)
class Line:
    """One run's line, in pieces where it has no value."""

    run_id: str
    name: str
    points: tuple[str, ...]
    """For ``polyline``; a piece of one point is a dot only."""
    dots: tuple[tuple[float, float], ...]
    words: str


@dataclass(frozen=True)
class Picture:
    width: float
    height: float
    top: float
    bottom: float
    axes: tuple[Axis, ...]
    lines: tuple[Line, ...]
    num_left_out: int


Columns = list[tuple[str, list[Any]]]
"""Title and values of each axis; None where a run has no value."""


def picture(runs: Sequence[Run], specs: Sequence[dict[str, Any]]) -> Picture | None:
    """Return parallel coordinates of these runs; None where they have fewer than two axes. Fields
    that are too many make way for the metrics, which they are compared by."""
    fields = [
        (path, [None if text is None else json.loads(text) for text in values])
        for path, values in differences(list(specs))
        if path.partition(".")[0] not in _LEFT_OUT
        and not any(text and _DIGEST.search(text) for text in values)
    ]
    names = sorted(
        {name for run in runs for name in run.metrics},
        key=lambda name: (name.startswith("val_"), not name.endswith("loss"), name),
    )
    metrics = [(name, [run.metrics.get(name) for run in runs]) for name in names[-MOST_AXES:]]
    shown = fields[: MOST_AXES - len(metrics)] + metrics
    num_left_out = len(fields) + len(names) - len(shown)
    return drawn(shown, [(run.id, run.name) for run in runs], num_left_out)


def drawn(shown: Columns, runs: Sequence[tuple[str, str]], num_left_out: int = 0) -> Picture | None:
    """Return parallel coordinates with these axes, for runs with (id, name); None with fewer than
    two axes or two runs."""
    if len(runs) < 2 or len(shown) < 2:
        return None
    axes = tuple(_axis(title, values, number) for number, (title, values) in enumerate(shown))
    return Picture(
        width=2 * _MARGIN_PX + _AXIS_PX * (len(axes) - 1),
        height=_TOP_PX + _HEIGHT_PX + _BOTTOM_PX,
        top=_TOP_PX,
        bottom=_TOP_PX + _HEIGHT_PX,
        axes=axes,
        lines=tuple(_line(run, number, axes) for number, run in enumerate(runs)),
        num_left_out=num_left_out,
    )


def _axis(title: str, values: Sequence[Any], number: int) -> Axis:
    x = _MARGIN_PX + _AXIS_PX * number
    found = [value for value in values if value is not None]
    if found and all(type(value) in (int, float) for value in found):
        place, ticks = _scale([float(value) for value in found])
        shares = [None if value is None else place(float(value)) for value in values]
        texts = [None if value is None else f"{value:.4g}" for value in values]
    else:
        texts = [None if value is None else _word(value) for value in values]
        order = {text: index for index, text in enumerate(dict.fromkeys(filter(None, texts)))}
        last = max(1, len(order) - 1)
        ticks = [(index / last, text) for text, index in order.items()]
        shares = [None if text is None else order[text] / last for text in texts]
    short = title if len(title) <= _LABEL_CHARS else f"…{title[1 - _LABEL_CHARS :]}"
    return Axis(
        short,
        title,
        x,
        tuple(Tick(_height(share), _short(text)) for share, text in ticks),
        tuple(None if share is None else _height(share) for share in shares),
        tuple(texts),
    )


def _scale(values: Sequence[float]) -> tuple[Any, list[tuple[float, str]]]:
    """Return the share of an axis (0 to 1) of a value, and its ticks."""
    low, high = min(values), max(values)
    if low == high:
        return lambda _value: 0.5, [(0.5, f"{low:.4g}")]
    logarithmic = low > 0 and high / low >= _LOG_RATIO
    bend = math.log10 if logarithmic else float
    begin, end = bend(low), bend(high)

    def share(value: float) -> float:
        return (bend(value) - begin) / (end - begin)

    middle = 10 ** ((begin + end) / 2) if logarithmic else (low + high) / 2
    return share, [(0.0, f"{low:.4g}"), (0.5, f"{middle:.3g}"), (1.0, f"{high:.4g}")]


def _height(share: float) -> float:
    return _TOP_PX + _HEIGHT_PX * (1 - share)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= _LABEL_CHARS else f"{text[: _LABEL_CHARS - 1]}…"


def _line(run: tuple[str, str], number: int, axes: Sequence[Axis]) -> Line:
    pieces: list[list[tuple[float, float]]] = [[]]
    for axis in axes:
        place = axis.places[number]
        if place is None:
            pieces.append([])
        else:
            pieces[-1].append((axis.x, place))
    return Line(
        *run,
        tuple(" ".join(f"{x:.1f},{y:.1f}" for x, y in piece) for piece in pieces if len(piece) > 1),
        tuple(point for piece in pieces for point in piece),
        ", ".join(_named(axes, number)),
    )


def _named(axes: Sequence[Axis], number: int) -> list[str]:
    return [
        f"{axis.full_title} {axis.texts[number]}" for axis in axes if axis.texts[number] is not None
    ]
