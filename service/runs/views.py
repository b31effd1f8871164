"""Runs as clients see them: one run, and lists page by page."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Annotated, Final

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
from service.db.runs import RunStore
from service.model.operator_rules import Prices
from service.model.rows import TransitionRow
from service.model.run_rows import ListedRun, RunHead, RunRow
from service.parts import part

_MOST_BYTES: Final = 96 << 20
"""Enough for some 60,000 runs."""
_OVERHEAD_BYTES: Final = 300
"""Memory per answer in addition to its text."""


class KeptAnswers:
    """JSON of runs that have ended, which many lists contain. The oldest go first. Thread-safe."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._lock = Lock()
        self._answers: OrderedDict[str, tuple[int, str | None, bytes]] = OrderedDict()

    def find(self, run: RunHead, ray_url: str | None) -> bytes | None:
        """Return the JSON if neither the row nor the address of Ray's dashboard has changed."""
        version, url, answer = self._answers.get(run.id, (None, None, None))
        return answer if (version, url) == (run.row_version, ray_url) else None

    def keep(self, run: RunHead, ray_url: str | None, answer: bytes) -> None:
        with self._lock:
            _, _, old = self._answers.pop(run.id, (0, None, None))
            self._answers[run.id] = (run.row_version, ray_url, answer)
            self._num_bytes += _size(answer) - _size(old)
            while self._num_bytes > _MOST_BYTES:
                _, (_, _, gone) = self._answers.popitem(last=False)
                self._num_bytes -= _size(gone)


def _size(answer: bytes | None) -> int:
    return 0 if answer is None else len(answer) + _OVERHEAD_BYTES


@dataclass(frozen=True)
class RunViews:
    """Answers about runs, as of now."""

    runs: RunStore
    links: ServiceLinks
    prices: Prices
    kept: KeptAnswers

    def json(self, run: RunRow | ListedRun, transitions: Sequence[TransitionRow]) -> JsonObject:
        """Return the JSON of a run with these transitions."""
        return run_json(run, transitions, self.links, self.runs.clock(), self.prices)

    async def one(self, run_id: str) -> JsonObject:
        """Return the JSON of a run. Raises 404."""
        found = await db_read(self.runs.listed, [run_id])
        if run_id not in found:
            raise not_found(f"run {run_id} does not exist")
        return self.json(*found[run_id])

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
        return self._json_of(found[:limit], run_cursor(found[limit - 1]) if more else None)

    def _json_of(self, heads: Sequence[RunHead], cursor: str | None) -> bytes:
        about = self.links.ray_url
        answers = {head.id: self.kept.find(head, about) for head in heads}
        missing = [run_id for run_id, answer in answers.items() if answer is None]
        fresh = self.runs.listed(missing)
        for head in heads:
            if head.id in fresh:
                run, transitions = fresh[head.id]
                answers[head.id] = answer = to_json(self.json(run, transitions))
                if run.status.terminal:
                    self.kept.keep(head, about, answer)
        # one may have been deleted since
        items = b",".join(answer for answer in answers.values() if answer is not None)
        return b'{"items":[%b],"next_cursor":%b}' % (items, to_json(cursor))


Kept = Annotated[KeptAnswers, part(KeptAnswers)]


async def run_views(runs: Runs, links: TheLinks, settings: TheSettings, kept: Kept) -> RunViews:
    return RunViews(runs, links, settings.prices, kept)


Views = Annotated[RunViews, Depends(run_views)]
