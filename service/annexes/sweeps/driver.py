"""Carry out what the engine decides on the runs of every sweep that has not ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, assert_never

import structlog

from everstep.spec.sweep import AshaSpec, SweepSpec
from everstep.wire.sweep import SweepReason, SweepReasonCode, SweepStatus
from service.annexes.sweeps.decide import (
    Action,
    Cancel,
    End,
    GoOn,
    Look,
    Outcome,
    Pause,
    Submit,
    SweepFacts,
    TrialFacts,
    at_the_end,
    decide,
    of_cancelled_run,
    rung_step,
    while_running,
)
from service.annexes.sweeps.store import SweepPlace, SweepRow, SweepStore, TrialRow
from service.db.checkpoints import OriginGone
from service.db.engine import DatabaseError
from service.db.projects import QuotaExceeded, UnknownProject
from service.db.runs import PlaceTaken, RunStore
from service.model.states import TransitionConflict
from service.projections.attempts import cancelled_by_sweep, paused_by_sweep

INTERVAL_S: Final = 1.0
_POINTS: Final = 5000
"""Points of a metric that one look reads of each run."""
_STATUS_OF: Final[dict[Outcome, SweepStatus]] = {
    "succeeded": SweepStatus.SUCCEEDED,
    "runs_failed": SweepStatus.FAILED,
    "metric_missing": SweepStatus.FAILED,
    "no_value": SweepStatus.FAILED,
    "cancelled": SweepStatus.CANCELLED,
}

log = structlog.get_logger(__name__)


class SweepDriver:
    """Advances sweeps. Each look begins from the database alone, so that any process may take the
    next one, and a crash between two lines is harmless: a place in a sweep is filled in the
    transaction that records its run, and every other action is decided again until its effect
    shows.
    """

    def __init__(self, sweeps: SweepStore, runs: RunStore) -> None:
        self._sweeps = sweeps
        self._runs = runs
        self._seen: dict[str, tuple[int, int]] = {}
        """Row version of each run whose metrics were read to their end, and the rung read for."""

    async def work(self) -> None:
        """Look at every sweep once. Raises DatabaseError."""
        await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Look at every sweep once. Raises DatabaseError; another fault of one sweep is logged, and
        does not stop the others."""
        live = self._sweeps.live()
        if not live:
            self._seen.clear()
            return
        trials = self._sweeps.trials([sweep.id for sweep in live])
        for sweep in live:
            try:
                self._advance(sweep, trials[sweep.id])
            except DatabaseError:
                raise
            except Exception:
                log.exception("a sweep cannot be advanced; trying again", sweep_id=sweep.id)

    def _advance(self, sweep: SweepRow, rows: list[TrialRow]) -> None:
        spec = sweep.sweep_spec
        rows = self._measured(sweep, spec, rows)
        look = Look(sweep, spec, rows, facts_of(sweep, spec, rows))
        hindrance = None
        for action in decide(look.facts):
            hindrance = self._do(look, action)
            if hindrance is not None:
                break
        reason = hindrance or while_running(look)
        if sweep.state == SweepStatus.RUNNING and _differs(sweep, reason):
            self._sweeps.set_reason(sweep.id, reason)

    # ------------------------------------------------------------ what the runs have reached

    def _measured(self, sweep: SweepRow, spec: SweepSpec, rows: list[TrialRow]) -> list[TrialRow]:
        """Return the runs with their newest values, which are recorded first: what was decided by
        must not change any more."""
        changes: dict[int, dict[str, Any]] = {}
        for place, row in enumerate(rows):
            if row.run_id is None or row.row_version is None:
                continue
            version = (row.row_version, row.rung)
            if self._seen.get(row.run_id) == version:
                continue
            columns, is_at_end = self._best(spec, row)
            columns |= self._results(spec, row)
            if columns:
                changes[row.number] = columns
                rows[place] = replace(row, **columns)
            if is_at_end:
                self._seen[row.run_id] = version
        if changes:
            self._sweeps.record(sweep.id, changes)
        return rows

    def _best(self, spec: SweepSpec, row: TrialRow) -> tuple[dict[str, Any], bool]:
        """Return the columns of a run's best value as far as they change, and whether every point
        was read."""
        assert row.run_id is not None
        after = -1 if row.seen_step is None else row.seen_step
        points = self._sweeps.series.behind(row.run_id, spec.metric, after, _POINTS)
        if not points:
            return {}, True
        best = (row.best_value, row.best_step)
        for point in points:
            if point.value is not None and (
                best[0] is None
                or (point.value > best[0] if spec.mode == "max" else point.value < best[0])
            ):
                best = (point.value, point.step)
        columns = {"seen_step": points[-1].step, "best_value": best[0], "best_step": best[1]}
        return columns, len(points) < _POINTS

    def _results(self, spec: SweepSpec, row: TrialRow) -> dict[str, Any]:
        """Return the run's value at the rung that it trains to, if it has reached it: the first one
        from the rung's step on, however late it is read. A run that trained to its end has passed
        every rung."""
        if not isinstance(spec.scheduler, AshaSpec):
            return {}
        assert row.run_id is not None
        results = list(row.results)
        has_all = row.status is not None and row.status == "SUCCEEDED"
        while has_all or len(results) <= row.rung:
            step = rung_step(spec.scheduler, len(results), row.total_steps)
            found = step and self._sweeps.series.behind(row.run_id, spec.metric, step - 1, 1)
            if not found:
                break
            results.append([found[0].step, found[0].value])
        return {"results": results} if results != row.results else {}

    # ------------------------------------------------------------ actions

    def _do(self, look: Look, action: Action) -> SweepReason | None:
        """Carry out one action. Return what keeps the sweep from the rest, None if nothing does."""
        sweep = look.sweep
        try:
            match action:
                case Submit(number):
                    return self._submit(sweep, number)
                case Pause(number):
                    reason = paused_by_sweep(sweep.id)
                    self._runs.request_stop(look.run_id(number), "pause", reason)
                case GoOn(number, rung, is_paused):
                    # In this order: a crash in between leaves a run that is judged again.
                    if is_paused:
                        self._runs.resume(look.run_id(number))
                    self._sweeps.record(sweep.id, {number: {"rung": rung}})
                case Cancel(number):
                    reason = cancelled_by_sweep(sweep.id, of_cancelled_run(look))
                    self._runs.request_stop(look.run_id(number), "cancel", reason)
                case End(outcome):
                    names = self._metric_names(look) if outcome == "metric_missing" else []
                    why = at_the_end(look, outcome, names)
                    self._sweeps.end(sweep.id, _STATUS_OF[outcome], why)
                    log.info("a sweep has ended", sweep_id=sweep.id, outcome=outcome)
                case _:
                    assert_never(action)
        except TransitionConflict as exc:
            # the run moved on meanwhile: the next look sees where
            log.info("a run of a sweep has moved on", sweep_id=sweep.id, problem=str(exc))
        return None

    def _submit(self, sweep: SweepRow, number: int) -> SweepReason | None:
        spec = self._sweeps.trial_spec(sweep.id, number)
        place = SweepPlace(sweep.id, number)
        try:
            run, _ = self._runs.create(spec, sweep.created_by, create_project=False, place=place)
        except QuotaExceeded as exc:
            return SweepReason(code=SweepReasonCode.WAITING_FOR_QUOTA, message=str(exc))
        except PlaceTaken:
            return None
        except (UnknownProject, OriginGone) as exc:
            reason = SweepReason(code=SweepReasonCode.RUNS_FAILED, message=str(exc))
            self._sweeps.end(sweep.id, SweepStatus.FAILED, reason)
            return reason
        log.info("submitted a run of a sweep", sweep_id=sweep.id, number=number, run_id=run.id)
        return None

    def _metric_names(self, look: Look) -> list[str]:
        """Return the metrics of a run that trained to its end."""
        ended = next(row.run_id for row in look.rows if row.run_id and row.status == "SUCCEEDED")
        return self._sweeps.metric_names(ended)


def facts_of(sweep: SweepRow, spec: SweepSpec, rows: Sequence[TrialRow]) -> SweepFacts:
    """Return what the engine decides by."""
    asha = spec.scheduler if isinstance(spec.scheduler, AshaSpec) else None
    return SweepFacts(
        trials=tuple(
            TrialFacts(
                number=row.number,
                status=row.status,
                is_gone=row.is_deleted,
                stop=row.stop_requested,
                rung=row.rung,
                results=tuple(value for _, value in row.results),
                has_metric=row.seen_step is not None,
                has_value=row.best_value is not None and math.isfinite(row.best_value),
            )
            for row in rows
        ),
        larger_is_better=spec.mode == "max",
        max_parallel=spec.max_parallel,
        reduction_factor=asha.reduction_factor if asha else None,
        cancelling=sweep.state == SweepStatus.STOPPING,
    )


def _differs(sweep: SweepRow, reason: SweepReason | None) -> bool:
    now = (reason.code.value, reason.message) if reason else (None, None)
    return now != (sweep.reason_code, sweep.reason_message)
