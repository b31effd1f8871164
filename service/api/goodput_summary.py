"""Goodput of all runs by project: the sum of their ledgers, without re-reading runs that have
ended."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from everstep.wire import GoodputBuckets, ProjectGoodput, RunStatus
from service.db.runs import RunStore
from service.projections.goodput import BUCKETS, TimeLedger, to_us

_HELD: Final = tuple(name for name in BUCKETS if name not in ("queued", "paused"))
"""Buckets in which a run holds resources, or may."""


class TimeBook:
    """Ledgers of runs in microseconds. Thread-safe."""

    def __init__(self, runs: RunStore) -> None:
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
