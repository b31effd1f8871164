"""The page *runs*: a live list with search, filters, a choice of columns and an order. Its URL
contains all of them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from everstep.spec.yaml_text import value_at
from everstep.text import words as cli_words
from everstep.text.words import differences, leaves
from everstep.wire import Run, RunStatus
from service.api.answers import MOST_CURSOR_CHARS
from service.api.auth import controlled_run, visible_run
from service.api.blocking import db_read
from service.api.callers import Principal
from service.api.problems import ApiProblem, as_problem, invalid_request
from service.db.audit import begin_entry, current_entry
from service.db.engine import DatabaseUnavailable
from service.db.run_lookup import RunFilter, RunOrder
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from service.runs.routes import Control, RunActions, parse_order, parse_tag
from service.runs.views import Views
from service.web.rendering import STATUS_GROUPS, PageRoute, page, progress_share
from service.web.session import CheckedFields, WebCaller, local_path

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

_PAGE_RUNS: Final = 50
_NEWEST: Final = RunOrder("created_at", descending=True)


@router.get("/runs")
async def get_runs(
    request: Request,
    views: Views,
    caller: WebCaller,
    search: Annotated[str, Query(max_length=128)] = "",
    status: Annotated[str, Query(max_length=16)] = "",
    project: Annotated[str, Query(max_length=64)] = "",
    tag: Annotated[str, Query(max_length=400)] = "",
    sort: Annotated[str, Query(max_length=400)] = "",
    columns: Annotated[list[str] | None, Query()] = None,
    cursor: Annotated[str, Query(max_length=MOST_CURSOR_CHARS)] = "",
) -> Response:
    search = search.strip()
    tags = (parse_tag(tag),) if tag else ()
    statuses = STATUS_GROUPS.get(status, (RunStatus(status),) if status in set(RunStatus) else ())
    wanted = RunFilter(
        project=project or None, statuses=tuple(statuses), search=search or None, tags=tags
    )
    order = parse_order(sort)
    shown = chosen(columns or ())
    found = await views.found(caller, wanted, _PAGE_RUNS, cursor or None, order)
    where = RunFilter(project=caller.project or project or None, search=search or None, tags=tags)
    counts = await db_read(views.runs.count_by_status, where)
    filters = {"search": search, "status": status, "project": project, "tag": tag}
    given = filters | {"sort": str(order) if order else "", "columns": _written(shown)}

    def link(**changes: str | None) -> str:
        """Return the URL of this page with other filters, from its first run."""
        return _address(given | changes)

    is_update = "hx-request" in request.headers
    specs = (
        await _specs(views.runs, found.items)
        if not is_update or any(column.key.startswith("spec.") for column in shown)
        else {}
    )
    return page(
        request,
        "runs.html",
        caller,
        runs=found.items,
        specs=specs,
        counts={"": sum(counts.values())}
        | {name: sum(counts[each] for each in group) for name, group in STATUS_GROUPS.items()},
        given=given,
        link=link,
        next_page=_address(given | {"cursor": found.next_cursor}) if found.next_cursor else None,
        is_first_page=not cursor,
        is_filtered=any(filters.values()),
        columns=shown,
        sort_link=lambda column: sort_link(column, order or _NEWEST, link),
        suggestions=[]
        if is_update  # it replaces the list only
        else suggestions(found.items, list(specs.values())),
        known_columns=COLUMNS,
        first_columns=(STATUS, NAME),
        value_of=value_of,
        usage_parts=cli_words.usage_parts,
        progress_share=progress_share,
    )


async def _specs(store: RunStore, runs: tuple[Run, ...]) -> dict[str, dict[str, Any]]:
    """Return the spec of each run by its id."""
    rows = await db_read(store.rows, [run.id for run in runs])
    return {run_id: row.spec for run_id, row in rows.items()}


def _written(columns: tuple[Column, ...]) -> str:
    """Return the columns as the URL has them; empty for the default ones."""
    keys = tuple(column.key for column in columns)
    return "" if keys == DEFAULT else ",".join(keys)


def _address(values: dict[str, Any]) -> str:
    query = urlencode({name: value for name, value in values.items() if value})
    return f"/runs?{query}" if query else "/runs"


# ---------------------------------------------------------------- columns

# Columns of the list: fields of a run, metrics by name, fields of the spec by path.

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


# ---------------------------------------------------------------- selected runs

# What is done with several runs of the list at once: compare, cancel, delete.

_ACTIONS: Final[Mapping[str, Callable[[RunActions, RunRow], Awaitable[object]]]] = {
    "cancel": RunActions.cancel,
    "delete": RunActions.delete,
}


@router.post("/runs/selected")
async def post_selected(
    request: Request, control: Control, caller: WebCaller, fields: CheckedFields
) -> Response:
    """Do the same with each run of the list that was ticked; tell those with which it failed."""
    given = dict(fields)
    ids = list(dict.fromkeys(value for name, value in fields if name == "run"))
    action, back = given.get("action", ""), local_path(given.get("back"))
    if action == "compare":
        query = urlencode([("run", run_id) for run_id in ids])
        return RedirectResponse(f"/compare?{query}" if ids else "/compare", 303)
    if action not in _ACTIONS:
        raise invalid_request("action", msg="choose compare, cancel or delete")
    caller.require("submitter")
    refused = await _each(control, caller, action, ids)
    if not refused:
        return RedirectResponse(back, 303)
    return page(
        request,
        "selected.html",
        caller,
        409,
        action=action,
        refused=refused,
        num_done=len(ids) - len(refused),
        back=back,
    )


async def _each(
    control: RunActions, caller: Principal, action: str, ids: list[str]
) -> list[tuple[str, str]]:
    """Do it with each run; return those with which it failed, and why. Each has an entry of its own
    in the audit log."""
    refused, call = [], current_entry()
    for run_id in ids:
        if call is not None:
            begin_entry(replace(call, target=run_id, seq=None, written_as=None))
        try:
            run = await controlled_run(
                await visible_run(run_id, control.views.runs, caller), caller
            )
            await _ACTIONS[action](control, run)
        except DatabaseUnavailable:
            raise
        except Exception as exc:
            problem: ApiProblem = as_problem(exc)
            if problem.status >= 500 and not isinstance(exc, ApiProblem):
                raise
            refused.append((run_id, problem.detail))
        finally:
            begin_entry(call)
    return refused
