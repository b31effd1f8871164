"""Runs as clients see them: one run, and lists page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends
from pydantic_core import to_json

from everstep.wire import Page, Run
from service.api.answers import (
    JsonObject,
    ServiceLinks,
    order_cursor,
    parse_order_cursor,
    parse_run_cursor,
    run_cursor,
    run_json,
)
from service.api.blocking import db_read
from service.api.callers import Principal
from service.api.dependencies import Runs, TheLinks, TheSettings
from service.api.problems import not_found
from service.db.run_lookup import RunFilter, RunOrder
from service.db.run_queries import Listed
from service.db.runs import RunStore
from service.model.operator_rules import Prices
from service.model.rows import TransitionRow
from service.model.run_rows import ListedRun, RunRow


@dataclass(frozen=True)
class RunViews:
    """Answers about runs, as of now."""

    runs: RunStore
    links: ServiceLinks
    prices: Prices

    def json(self, run: RunRow | ListedRun, transitions: Sequence[TransitionRow]) -> JsonObject:
        """Return the JSON of a run with these transitions."""
        return run_json(run, transitions, self.links, self.runs.clock(), self.prices)

    async def one(self, run_id: str) -> JsonObject:
        """Return the JSON of a run. Raises 404."""
        found = await db_read(self.runs.one, run_id)
        if found is None:
            raise not_found(f"run {run_id} does not exist")
        return self.json(*found)

    async def of(self, rows: Sequence[RunRow]) -> list[Run]:
        """Return these runs in the same order."""
        transitions = await db_read(self.runs.transitions, [run.id for run in rows])
        return [Run.model_validate(self.json(run, transitions[run.id])) for run in rows]

    async def page(
        self,
        caller: Principal,
        wanted: RunFilter,
        limit: int,
        cursor: str | None,
        order: RunOrder | None = None,
    ) -> bytes:
        """Return the JSON of a page of the runs that the caller may see, newest first or in another
        order. Raises 422 for a cursor of another list."""
        return await db_read(self._page, caller, wanted, limit, cursor, order)

    async def found(
        self,
        caller: Principal,
        wanted: RunFilter,
        limit: int,
        cursor: str | None = None,
        order: RunOrder | None = None,
    ) -> Page[Run]:
        """Return what ``page`` returns."""
        found = await self.page(caller, wanted, limit, cursor, order)
        return Page[Run].model_validate_json(found)

    def _page(
        self,
        caller: Principal,
        wanted: RunFilter,
        limit: int,
        cursor: str | None,
        order: RunOrder | None,
    ) -> bytes:
        if caller.project is not None and wanted.project not in (None, caller.project):
            return self._json_of([], None)
        wanted = replace(wanted, project=caller.project or wanted.project)
        if order is not None:
            after = parse_order_cursor(order, cursor)
            found, last = self.runs.ordered(wanted, order, limit, after)
            return self._json_of(found, order_cursor(order, last))
        found = self.runs.page(wanted, limit + 1, parse_run_cursor(cursor))
        more = len(found) > limit
        return self._json_of(found[:limit], run_cursor(found[limit - 1][0]) if more else None)

    def _json_of(self, found: Sequence[Listed], cursor: str | None) -> bytes:
        return to_json({"items": [self.json(*each) for each in found], "next_cursor": cursor})


async def run_views(runs: Runs, links: TheLinks, settings: TheSettings) -> RunViews:
    return RunViews(runs, links, settings.prices)


Views = Annotated[RunViews, Depends(run_views)]
