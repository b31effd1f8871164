"""Pages of runs: filters, queries and the response in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Final, TypeVar

from pydantic_core import to_json

from everstep.wire import Page, Run
from service.api.answers import run_json
from service.api.auth import Claimant, Principal
from service.api.context import ApiContext
from service.api.paging import order_cursor, parse_order_cursor, parse_run_cursor, run_cursor
from service.api.problems import invalid_request
from service.db.run_lookup import Place as AgePlace
from service.db.run_lookup import RunFilter
from service.db.run_order import Place, RunOrder
from service.model.run_rows import RunHead

Status = TypeVar("Status", bound=StrEnum)

SHORT_PAGE: Final = 50


async def found_runs(
    context: ApiContext,
    caller: Principal,
    wanted: RunFilter,
    limit: int,
    cursor: str | None,
    order: RunOrder | None = None,
) -> Page[Run]:
    """Return a page of the runs that the caller may see, newest first or in another order."""
    if order is None:
        call = partial(_page, context, caller, wanted, limit, parse_run_cursor(cursor))
    else:
        after = parse_order_cursor(order, cursor)
        call = partial(ordered_page, context, caller, wanted, limit, order, after)
    return Page[Run].model_validate_json(await context.database_call(call))


def parse_order(sort: str | None) -> RunOrder | None:
    """Parse ``KEY`` or ``-KEY``; None is newest first. Raises 422."""
    if not sort or sort == "-created_at":
        return None
    try:
        return RunOrder.parse(sort)
    except ValueError as exc:
        raise invalid_request("sort", msg=f"cannot sort by this: {exc}") from exc


def ordered_page(
    context: ApiContext,
    caller: Principal,
    wanted: RunFilter,
    limit: int,
    order: RunOrder,
    after: Place | None,
) -> bytes:
    """Return a page in an order as JSON. Raise 401 if a claimant's token is no longer valid."""
    if isinstance(caller, Claimant):
        with context.database.autocommit() as connection:
            caller.confirm(context, connection)
    if not _reaches_any(caller, wanted):
        return _json_of(context, [], None)
    heads, last = context.runs.ordered(_reached(caller, wanted), order, limit, after)
    return _json_of(context, heads, order_cursor(order, last))


def confirmed_page(
    context: ApiContext, caller: Claimant, wanted: RunFilter, limit: int, before: AgePlace | None
) -> bytes:
    """Return the page as JSON. Raise 401 if the caller's token is no longer valid."""
    with context.database.autocommit() as connection:
        if not _reaches_any(caller, wanted):
            caller.confirm(context, connection)
            return _page_of(context, [], limit)
        heads = context.runs.claimed_page(caller.claim, _reached(caller, wanted), limit + 1, before)
        if heads is None:
            raise caller.refused(context)
        return _page_of(context, heads, limit)


def _page(
    context: ApiContext, caller: Principal, wanted: RunFilter, limit: int, before: AgePlace | None
) -> bytes:
    """Return the page as JSON, for a caller who was confirmed."""
    heads = (
        context.runs.page(_reached(caller, wanted), limit + 1, before)
        if _reaches_any(caller, wanted)
        else []
    )
    return _page_of(context, heads, limit)


def _reaches_any(caller: Principal, wanted: RunFilter) -> bool:
    return caller.project is None or wanted.project in (None, caller.project)


def _reached(caller: Principal, wanted: RunFilter) -> RunFilter:
    return replace(wanted, project=caller.project or wanted.project)


def _page_of(context: ApiContext, heads: Sequence[RunHead], limit: int) -> bytes:
    """Return these runs as JSON, at most ``limit``."""
    cursor = run_cursor(heads[limit - 1]) if len(heads) > limit else None
    return _json_of(context, heads[:limit], cursor)


def _json_of(context: ApiContext, heads: Sequence[RunHead], cursor: str | None) -> bytes:
    answers = _answers_about(context, heads)
    # one may have been deleted since
    items = b",".join(answers[head.id] for head in heads if head.id in answers)
    return b'{"items":[%b],"next_cursor":%b}' % (items, to_json(cursor))


def _answers_about(context: ApiContext, heads: Sequence[RunHead]) -> dict[str, bytes]:
    """Return the JSON of each run. The JSON of a run that has ended is cached."""
    about = dashboard_url, public_url = context.cluster_view.dashboard_url, context.public_url
    kept = {head.id: context.kept_answers.get(head, about) for head in heads}
    found = {run_id: answer for run_id, answer in kept.items() if answer is not None}
    now, fresh = (
        context.clock(),
        context.runs.listed([run_id for run_id in kept if run_id not in found]),
    )
    for head in heads:
        if head.id in fresh:
            run, transitions = fresh[head.id]
            answer = run_json(run, transitions, dashboard_url, now, public_url, context.prices)
            found[head.id] = to_json(answer)
            if run.status.terminal:
                context.kept_answers.keep(head, about, found[head.id])
    return found


def statuses(given: Sequence[str], kind: type[Status]) -> tuple[Status, ...]:
    """Return the statuses of a filter, which may be separated by commas. Raises 422."""
    names = [name.strip().upper() for text in given for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in set(kind)]
    if unknown:
        raise invalid_request(
            "status",
            msg=f"{unknown[0][:40]!r} is not a status; the statuses are {', '.join(kind)}",
        )
    return tuple(kind(name) for name in names)


def parse_tag(text: str) -> tuple[str, str | None]:
    """Parse ``key=value`` or ``key`` for a filter."""
    key, separator, value = text.partition("=")
    if not separator:
        key, separator, value = text.partition(":")
    return key, value if separator else None
