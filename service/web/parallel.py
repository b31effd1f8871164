"""Parallel coordinates of several runs: an axis for each hyperparameter in which they differ and
for each metric, a line for each run. Drawn on the server, so that it needs no script."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from everstep.text.differences import differences
from everstep.wire import Run

MOST_AXES: Final = 16
_LOG_RATIO: Final = 50.0
"""From this ratio of the largest value to the smallest on, an axis is logarithmic."""
_LEFT_OUT: Final = ("tags", "priority", "project", "resume_from", "env", "notify")
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
    ]
    names = sorted({name for run in runs for name in run.metrics}, key=_metric_rank)
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


def _metric_rank(name: str) -> tuple[bool, bool, str]:
    return (name.startswith("val_"), not name.endswith("loss"), name)


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
