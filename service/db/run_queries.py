"""Queries about runs: one run, a page of runs, the runs that the reconciler works on."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from sqlalchemy import bindparam, func, select

from everstep.wire import GoodputBuckets, ProjectGoodput, RunStatus
from service.db.engine import Store
from service.db.run_lookup import (
    EVERY_RUN,
    Place,
    RunFilter,
    RunOrder,
    counted,
    find_run,
    ordered_page,
    page_query,
)
from service.db.run_lookup import OrderPlace as OrderedPlace
from service.db.tables import IS_LIVE, runs, transitions
from service.model.rows import TransitionRow
from service.model.run_rows import ListedRun, RunHead, RunRow
from service.projections.goodput import BUCKETS, TimeLedger, to_us

_CHUNK_IDS: Final = 500
_ROWS: Final = RunRow.select(runs)
_LISTED_BY_IDS: Final = ListedRun.select(runs).where(
    runs.c.id.in_(bindparam("ids", expanding=True))
)
_HEADS: Final = select(*(runs.c[name] for name in RunHead._fields))
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


class RunQueries(Store):
    """Reads runs."""

    def get(self, run_id: str) -> RunRow | None:
        with self._database.autocommit() as connection:
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
                for row in connection.execute(
                    page_query(connection, _ROWS, where, limit, before)
                ).all()
            ]

    def page(self, where: RunFilter, limit: int, before: Place | None = None) -> list[RunHead]:
        """Return the heads of the runs of a page; ``listed`` returns the rest."""
        with self._database.autocommit() as connection:
            return [
                RunHead._make(row)
                for row in connection.execute(
                    page_query(connection, _HEADS, where, limit, before)
                ).all()
            ]

    def ordered(
        self, where: RunFilter, order: RunOrder, limit: int, after: OrderedPlace | None = None
    ) -> tuple[list[RunHead], OrderedPlace | None]:
        """Return the heads of a page in another order, and the place of its last run if more
        follow."""
        with self._database.autocommit() as connection:
            return ordered_page(connection, where, order, limit, after, self._clock())

    def listed(self, run_ids: Collection[str]) -> dict[str, tuple[ListedRun, list[TransitionRow]]]:
        """Return these runs by id with their transitions at the same time, oldest first. Deleted
        runs are left out."""
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
        with self._database.autocommit() as connection:
            return {run_id: version for run_id, version in connection.execute(_LIVE_HEADS)}

    def rows(self, run_ids: Sequence[str]) -> dict[str, RunRow]:
        """Return these runs by id, without deleted ones."""
        with self._database.autocommit() as connection:
            found = connection.execute(_BY_IDS, {"ids": list(run_ids)})
            return {run.id: run for run in map(RunRow.read, found)}

    def heads(self) -> dict[str, tuple[str, str]]:
        """Return (project, status) of every run by id."""
        query = select(runs.c.id, runs.c.project, runs.c.status)
        with self._database.read() as connection:
            return {
                run_id: (project, status) for run_id, project, status in connection.execute(query)
            }

    def ledgers(self, run_ids: Sequence[str]) -> dict[str, tuple[dict[str, Any], float | None]]:
        """Return (time ledger, end time in unix seconds or None) of each of these runs. Deleted
        runs are left out."""
        found: dict[str, tuple[dict[str, Any], float | None]] = {}
        columns = (runs.c.id, runs.c.time_ledger, runs.c.finished_at)
        with self._database.read() as connection:
            for start in range(0, len(run_ids), _CHUNK_IDS):
                query = select(*columns).where(runs.c.id.in_(run_ids[start : start + _CHUNK_IDS]))
                found |= {
                    run_id: (ledger, finished_at)
                    for run_id, ledger, finished_at in connection.execute(query)
                }
        return found

    def transitions(self, run_ids: Collection[str]) -> dict[str, list[TransitionRow]]:
        """Return the transitions of each run, oldest first."""
        found: dict[str, list[TransitionRow]] = {run_id: [] for run_id in run_ids}
        with self._database.autocommit() as connection:
            for row in connection.execute(_TRANSITIONS, {"ids": list(run_ids)}).all():
                found[row[0]].append(TransitionRow._make(row))
        return found

    def count_by_status(self, where: RunFilter = EVERY_RUN) -> dict[RunStatus, int]:
        """Return the number of runs in each status, by default of all runs."""
        query = counted(_STATUS_COUNTS, where)
        with self._database.read() as connection:
            found = connection.execute(query.group_by(runs.c.status)).all()
        return dict.fromkeys(RunStatus, 0) | {RunStatus(status): count for status, count in found}


# ---------------------------------------------------------------- time of all runs

# Goodput of all runs by project: the sum of their ledgers, without re-reading runs that have
# ended.

_HELD: Final = tuple(name for name in BUCKETS if name not in ("queued", "paused"))
"""Buckets in which a run holds resources, or may."""


class TimeBook:
    """Ledgers of runs in microseconds. Thread-safe."""

    def __init__(self, runs: RunQueries) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._ended: dict[str, dict[str, int]] = {}

    def by_project(self, now: float, projects: Iterable[str] | None = None) -> list[ProjectGoodput]:
        """Return the time of every existing run up to ``now`` (unix seconds), by project name.

        Args:
            projects: only these; None for all.
        """
        wanted = None if projects is None else set(projects)
        with self._lock:
            heads = self._runs.heads()
            self._ended = {
                run_id: spent for run_id, spent in self._ended.items() if run_id in heads
            }
            ledgers = self._runs.ledgers([run_id for run_id in heads if run_id not in self._ended])
            totals: dict[str, tuple[int, dict[str, int]]] = {}
            for run_id, (project, status) in heads.items():
                spent = self._ended.get(run_id)
                if spent is None and run_id in ledgers:
                    state, finished_at = ledgers[run_id]
                    spent = _spent(
                        TimeLedger.load(state), now if finished_at is None else finished_at
                    )
                    if RunStatus(status).terminal and finished_at is not None:
                        self._ended[run_id] = spent
                if spent is None or (wanted is not None and project not in wanted):
                    continue
                count, total = totals.get(project, (0, dict.fromkeys(BUCKETS, 0)))
                totals[project] = count + 1, {name: total[name] + spent[name] for name in BUCKETS}
        return [_answer(project, *totals[project]) for project in sorted(totals)]


def _spent(ledger: TimeLedger, end: float) -> dict[str, int]:
    found = ledger.close(end)
    return {name: to_us(seconds) for name, seconds in found.buckets.model_dump().items()}


def _answer(project: str, runs: int, spent: dict[str, int]) -> ProjectGoodput:
    held = sum(spent[name] for name in _HELD)
    return ProjectGoodput(
        project=project,
        runs=runs,
        wall_s=sum(spent.values()) / 1e6,
        buckets=GoodputBuckets(**{name: us / 1e6 for name, us in spent.items()}),
        goodput=spent["productive"] / held if held else None,
    )
