"""Queries about runs: one run, a page of runs, the runs that the reconciler works on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from sqlalchemy import bindparam, func, select

from everstep.wire import GoodputBuckets, ProjectGoodput, RunStatus
from service.db.engine import Store
from service.db.run_lookup import (
    EVERY_RUN,
    HEADS,
    Place,
    RunFilter,
    RunOrder,
    find_run,
    matching,
    ordered_page,
    page_query,
)
from service.db.run_lookup import OrderPlace as OrderedPlace
from service.db.tables import IS_LIVE, runs, transitions
from service.model.rows import TransitionRow
from service.model.run_rows import ListedRun, RunHead, RunRow
from service.projections.goodput import BUCKETS, TimeLedger

_ROWS: Final = RunRow.select(runs)
_LISTED_BY_IDS: Final = ListedRun.select(runs).where(
    runs.c.id.in_(bindparam("ids", expanding=True))
)
_STATUS_COUNTS: Final = select(runs.c.status, func.count())
_LIVE: Final = _ROWS.where(IS_LIVE).order_by(runs.c.created_at, runs.c.id)
_LIVE_HEADS: Final = (
    select(runs.c.id, runs.c.row_version).where(IS_LIVE).order_by(runs.c.created_at, runs.c.id)
)
_BY_IDS: Final = _ROWS.where(runs.c.id.in_(bindparam("ids", expanding=True)))
_TRANSITIONS: Final = (
    select(*(transitions.c[name] for name in TransitionRow._fields))
    .where(transitions.c.run_id.in_(bindparam("ids", expanding=True)))
    .order_by(transitions.c.run_id, transitions.c.seq)
)


_MOST_REPLAYS: Final = 100
_REPLAYS: Final = (
    _ROWS.where(runs.c.replayed_run == bindparam("run_id"))
    .order_by(runs.c.created_at.desc(), runs.c.id.desc())
    .limit(_MOST_REPLAYS)
)

Listed = tuple[ListedRun, list[TransitionRow]]
"""A run in a list, and its transitions, oldest first."""


class RunQueries(Store):
    """Reads runs."""

    def get(self, run_id: str) -> RunRow | None:
        with self._database.read() as connection:
            return find_run(connection, run_id)

    def replays_of(self, run_id: str) -> list[RunRow]:
        """Return the runs that train steps of this one again, newest first, at most a hundred."""
        with self._database.read() as connection:
            rows = connection.execute(_REPLAYS, {"run_id": run_id}).all()
            return [RunRow.read(row) for row in rows]

    def find(self, where: RunFilter, limit: int, before: Place | None = None) -> list[RunRow]:
        """Return runs, newest first. ``before`` is (created_at, id) of the last run of the previous
        page."""
        with self._database.read() as connection:
            return [
                RunRow.read(row)
                for row in connection.execute(page_query(_ROWS, where, limit, before)).all()
            ]

    def page(self, where: RunFilter, limit: int, before: Place | None = None) -> list[RunHead]:
        """Return the heads of the runs of a page, as ``find`` does; ``listed`` returns the rest."""
        with self._database.read() as connection:
            rows = connection.execute(page_query(HEADS, where, limit, before))
            return [RunHead._make(row) for row in rows]

    def ordered(
        self, where: RunFilter, order: RunOrder, limit: int, after: OrderedPlace | None = None
    ) -> tuple[list[RunHead], OrderedPlace | None]:
        """Return the heads of a page in another order, and the place of its last run if more
        follow."""
        with self._database.read() as connection:
            return ordered_page(connection, where, order, limit, after, self.clock())

    def listed(self, run_ids: Collection[str]) -> dict[str, Listed]:
        """Return these runs by id. Deleted runs are left out."""
        if not run_ids:
            return {}
        with self._database.read() as connection:
            found = connection.execute(_LISTED_BY_IDS, {"ids": list(run_ids)}).all()
            changes = self.transitions(run_ids)
        return {run.id: (run, changes[run.id]) for run in map(ListedRun.read, found)}

    def live(self) -> list[RunRow]:
        """Return every run that the reconciler works on, oldest first: neither ended nor paused."""
        with self._database.read() as connection:
            return [RunRow.read(row) for row in connection.execute(_LIVE)]

    def live_versions(self) -> dict[str, int]:
        """Return the row version of every live run by id, in the same order: unchanged rows need
        not be read again."""
        with self._database.read() as connection:
            return {run_id: version for run_id, version in connection.execute(_LIVE_HEADS)}

    def rows(self, run_ids: Sequence[str]) -> dict[str, RunRow]:
        """Return these runs by id, without deleted ones."""
        with self._database.read() as connection:
            found = connection.execute(_BY_IDS, {"ids": list(run_ids)})
            return {run.id: run for run in map(RunRow.read, found)}

    def transitions(self, run_ids: Collection[str]) -> dict[str, list[TransitionRow]]:
        """Return the transitions of each run, oldest first."""
        found: dict[str, list[TransitionRow]] = {run_id: [] for run_id in run_ids}
        with self._database.read() as connection:
            for row in connection.execute(_TRANSITIONS, {"ids": list(run_ids)}).all():
                found[row[0]].append(TransitionRow._make(row))
        return found

    def count_by_status(self, where: RunFilter = EVERY_RUN) -> dict[RunStatus, int]:
        """Return the number of runs in each status, by default of all runs."""
        query = matching(_STATUS_COUNTS, where)
        with self._database.read() as connection:
            found = connection.execute(query.group_by(runs.c.status)).all()
        return dict.fromkeys(RunStatus, 0) | {RunStatus(status): count for status, count in found}

    def time_by_project(
        self, now: float, projects: Collection[str] | None = None
    ) -> list[ProjectGoodput]:
        """Return the time of every run up to ``now`` (unix seconds) by project, of these projects
        if they are given. The database sums that of runs that have ended."""
        ledger = runs.c.time_ledger
        spent = (
            func.sum(func.coalesce(ledger["spent_us", name].as_float(), 0)) for name in BUCKETS
        )
        is_over = runs.c.finished_at.is_not(None)
        ended = select(runs.c.project, func.count(), *spent).where(is_over).group_by("project")
        others = select(runs.c.project, ledger).where(~is_over)
        if projects is not None:
            ended, others = (each.where(runs.c.project.in_(projects)) for each in (ended, others))
        with self._database.read() as connection:
            totals = {project: sums for project, *sums in connection.execute(ended)}
            for project, state in connection.execute(others):
                buckets = TimeLedger.load(state).close(now).buckets.model_dump()
                one = (1, *(1e6 * buckets[name] for name in BUCKETS))
                before = totals.get(project, [0] * len(one))
                totals[project] = [sum(each) for each in zip(before, one, strict=True)]
        return [_project_goodput(project, *totals[project]) for project in sorted(totals)]


_HELD: Final = tuple(name for name in BUCKETS if name not in ("queued", "paused"))
"""Buckets in which a run holds resources, or may."""


def _project_goodput(project: str, num_runs: int, *spent_us: float) -> ProjectGoodput:
    spent = {name: us / 1e6 for name, us in zip(BUCKETS, spent_us, strict=True)}
    held = sum(spent[name] for name in _HELD)
    return ProjectGoodput(
        project=project,
        runs=num_runs,
        wall_s=sum(spent_us) / 1e6,
        buckets=GoodputBuckets(**spent),
        goodput=spent["productive"] / held if held else None,
    )
