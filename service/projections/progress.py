"""How far a run is and what it has cost, as the API shows it."""

from __future__ import annotations

from typing import Any

from everstep.wire import RunStatus
from service.model.prices import Prices
from service.model.run_rows import RunSummary
from service.projections.work import WorkLedger


def progress_of(run: RunSummary, now: float) -> dict[str, Any]:
    """Return the JSON of ``wire.Progress`` at ``now`` (unix seconds)."""
    total, pace = run.total_steps, None
    if run.status is RunStatus.RUNNING and run.work_ledger is not None:
        pace = WorkLedger.load(run.work_ledger).steps_per_s(now)
    return {
        "fraction": min(1.0, run.step / total) if total else None,
        "steps_per_s": pace,
        "eta_s": max(0, total - run.step) / pace if total and pace else None,
        "elapsed_s": max(
            0.0, (now if run.finished_at is None else run.finished_at) - run.created_at
        ),
    }


def usage_of(run: RunSummary, now: float, prices: Prices) -> dict[str, Any]:
    """Return the JSON of ``wire.Usage`` at ``now`` (unix seconds)."""
    if run.work_ledger is None:
        return {"gpu_h": None, "cpu_h": None, "cost": None, "currency": None}
    gpu_h, cpu_h = WorkLedger.load(run.work_ledger).hours(now)
    cost = gpu_h * (prices.gpu_hour or 0.0) + cpu_h * (prices.cpu_hour or 0.0)
    return {
        "gpu_h": gpu_h,
        "cpu_h": cpu_h,
        "cost": cost if prices.any else None,
        "currency": prices.currency if prices.any else None,
    }
