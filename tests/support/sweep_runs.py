"""Sweeps of an API under test, and runs of them that train to their end."""

from __future__ import annotations

from typing import Any

from everstep.wire.events import EventKind
from service.annexes.sweeps.driver import SweepDriver
from service.annexes.sweeps.store import SweepStore
from tests.support.api_service import ApiService, Journal, spec


def sweep_body(**fields: Any) -> dict[str, Any]:
    """Return the smallest sweep, with fields set."""
    body = {"spec": spec(), "metric": "val_accuracy", "grid": {"optimizer.lr": [0.1, 0.2]}}
    return body | fields


async def create_sweep(api: ApiService, **fields: Any) -> dict[str, Any]:
    """Submit a sweep; return it as the API shows it."""
    answer = await api.http.post("/v1/sweeps", json=sweep_body(**fields))
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def advance(api: ApiService) -> None:
    """Look at every sweep, as the reconciler does every second."""
    SweepDriver(SweepStore(api.database, api.clock), api.runs).look()


def train(api: ApiService, run_id: str, accuracy: float, outcome: str = "succeeded") -> None:
    """Let a queued run train 30 steps, to its end."""
    api.runs.claim_submission(run_id, 0)
    api.runs.record_job(run_id, 1, "job")
    journal = Journal(at=api.clock.now)
    reason = {"code": "user_error", "message": "it raised"} if outcome == "failed" else None
    events = [*journal.start(), *(journal.steps(step, loss=1 / step) for step in range(1, 31))]
    for step in (10, 20, 30):
        value = accuracy * step / 30
        events.append(
            journal.event(EventKind.EVALUATED, step=step, epoch=0, metrics={"accuracy": value})
        )
    events.append(journal.event(EventKind.FINISHED, outcome=outcome, reason=reason, step=30))
    api.apply(run_id, events)
