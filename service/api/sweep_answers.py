"""Sweeps and their runs as clients read them."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.wire import RunStatus
from everstep.wire.sweep import (
    RungResult,
    Sweep,
    SweepBest,
    SweepLinks,
    SweepProgress,
    SweepReason,
    SweepReasonCode,
    SweepRun,
)
from service.api.answers import maybe_time, to_time
from service.model.states import LIVE
from service.model.sweep_rows import SweepRow, TrialRow


def sweep_answer(sweep: SweepRow, trials: Sequence[TrialRow], public_url: str | None) -> Sweep:
    """Return the sweep. ``public_url`` is the base URL of this service for browsers."""
    spec = sweep.sweep_spec
    return Sweep(
        id=sweep.id,
        name=sweep.name,
        project=sweep.project,
        status=sweep.state,
        reason=_reason(sweep),
        metric=spec.metric,
        mode=spec.mode,
        scheduler=spec.scheduler.name,
        seed=spec.seed if spec.random else None,
        max_parallel=spec.max_parallel,
        created_at=to_time(sweep.created_at),
        finished_at=maybe_time(sweep.finished_at),
        progress=_progress(trials),
        best=best_of(trials, spec.mode == "max"),
        links=SweepLinks(dashboard=f"{public_url}/sweeps/{sweep.id}" if public_url else None),
    )


def _reason(sweep: SweepRow) -> SweepReason | None:
    if sweep.reason_code is None:
        return None
    return SweepReason(code=SweepReasonCode(sweep.reason_code), message=sweep.reason_message or "")


def _progress(trials: Sequence[TrialRow]) -> SweepProgress:
    statuses = [trial.status for trial in trials]
    return SweepProgress(
        total=len(trials),
        waiting=sum(trial.run_id is None for trial in trials),
        active=sum(status in LIVE for status in statuses),
        paused=statuses.count(RunStatus.PAUSED),
        succeeded=statuses.count(RunStatus.SUCCEEDED),
        failed=statuses.count(RunStatus.FAILED),
        cancelled=statuses.count(RunStatus.CANCELLED) + sum(trial.is_deleted for trial in trials),
    )


def best_of(trials: Sequence[TrialRow], larger_is_better: bool) -> SweepBest | None:
    """Return the run with the best value; of equal ones the first. Deleted runs do not count."""
    sign = -1.0 if larger_is_better else 1.0
    found = [
        (sign * trial.best_value, trial.number, trial)
        for trial in trials
        if trial.best_value is not None and trial.status is not None
    ]
    if not found:
        return None
    _, _, trial = min(found, key=lambda each: each[:2])
    assert trial.run_id and trial.best_value is not None and trial.best_step is not None
    return SweepBest(
        run_id=trial.run_id,
        number=trial.number,
        value=trial.best_value,
        step=trial.best_step,
        params=trial.params,
    )


def run_of_sweep(trial: TrialRow) -> SweepRun:
    return SweepRun(
        number=trial.number,
        params=trial.params,
        run_id=trial.run_id,
        is_deleted=trial.is_deleted,
        status=trial.status,
        step=trial.step or 0,
        total_steps=trial.total_steps,
        value=trial.best_value,
        value_step=trial.best_step,
        rung=trial.rung,
        results=tuple(RungResult(step=step, value=value) for step, value in trial.results),
    )
