"""Columns of the list of runs: fields of a run, metrics by name, fields of the spec by path."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from everstep.spec.yaml_text import value_at
from everstep.text.words import differences, leaves
from everstep.wire import Run
from service.api.problems import invalid_request
from service.db.run_lookup import RunOrder

MOST_COLUMNS: Final = 24
_MOST_FIELDS: Final = 300
_VALUE_CHARS: Final = 80
_BY_PATH: Final = ("metrics.", "spec.")


@dataclass(frozen=True)
class Column:
    """A column as the page draws it."""

    key: str
    """Its name in the URL, and what the list is sorted by."""
    title: str
    is_number: bool = True
    first_descends: bool = True
    """Whether the first click sorts the largest first."""
    can_sort: bool = True


COLUMNS: Final[Mapping[str, Column]] = MappingProxyType(
    {
        column.key: column
        for column in (
            Column("step", "Progress", is_number=False),
            Column("latest", "Latest", is_number=False, can_sort=False),
            Column("best", "Best"),
            Column("goodput", "Goodput"),
            Column("world_size", "Ranks"),
            Column("restarts", "Restarts"),
            Column("duration", "Duration"),
            Column("usage", "Used", can_sort=False),
            Column("owner", "Owner", is_number=False, first_descends=False),
            Column("priority", "Priority"),
            Column("notes", "Notes", is_number=False, can_sort=False),
            Column("started_at", "Started"),
            Column("finished_at", "Ended"),
            Column("created_at", "Created"),
        )
    }
)
STATUS: Final = Column("status", "Status", is_number=False, first_descends=False)
NAME: Final = Column("name", "Run", is_number=False, first_descends=False)
DEFAULT: Final = (
    *("step", "latest", "goodput", "world_size", "restarts"),
    *("duration", "created_at"),
)


def chosen(given: Iterable[str]) -> tuple[Column, ...]:
    """Return the columns with these keys, each once; none means the default ones. Raises 422 for a
    key that is not a column."""
    keys = dict.fromkeys(key.strip() for text in given for key in text.split(",") if key.strip())
    if len(keys) > MOST_COLUMNS:
        raise invalid_request("columns", msg=f"choose at most {MOST_COLUMNS} columns")
    return tuple(map(_column, keys or DEFAULT))


def _column(key: str) -> Column:
    if key in COLUMNS:
        return COLUMNS[key]
    if not key.startswith(_BY_PATH):
        names = ", ".join((*COLUMNS, "metrics.NAME", "spec.FIELD"))
        raise invalid_request("columns", msg=f"{key[:60]!r} is not a column; choose among {names}")
    try:
        RunOrder.parse(key)
    except ValueError as exc:
        raise invalid_request("columns", msg=str(exc)) from exc
    return Column(key, key.partition(".")[2])


def value_of(column: Column, run: Run, spec: Mapping[str, Any] | None) -> str | None:
    """Return the text in a column by path; None if the run has no such value."""
    kind, _, rest = column.key.partition(".")
    if kind == "metrics":
        return f"{run.metrics[rest]:.4g}" if rest in run.metrics else None
    value = value_at(spec, rest.split("."))
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARS else f"{text[: _VALUE_CHARS - 1]}…"


def suggestions(runs: Iterable[Run], specs: Sequence[dict[str, Any]]) -> list[str]:
    """Return keys of columns by path: metrics, then fields in which the specs differ, then other
    fields."""
    metrics = sorted({name for run in runs for name in run.metrics})
    differing = [path for path, _ in differences(list(specs))]
    others = [path for path in (leaves(specs[0]) if specs else ()) if path != "name"]
    keys = dict.fromkeys(
        [f"metrics.{name}" for name in metrics] + [f"spec.{path}" for path in (*differing, *others)]
    )
    return list(keys)[:_MOST_FIELDS]


def sort_link(column: Column, order: RunOrder, link: Callable[..., str]) -> tuple[str, str | None]:
    """Return the URL that a click on the title leads to, and how the column is sorted now:
    ``ascending``, ``descending`` or None."""
    is_now = order.key == column.key
    descending = not order.descending if is_now else column.first_descends
    state = ("descending" if order.descending else "ascending") if is_now else None
    return link(sort=str(RunOrder(column.key, descending))), state
