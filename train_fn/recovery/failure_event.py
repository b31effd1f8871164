"""The failure event: what happened, what follows, and what it is charged to."""

from __future__ import annotations

from datetime import UTC, datetime

from everstep.wire import Failure
from train_fn.recovery.decision import Decision
from train_fn.recovery.evidence import Evidence
from train_fn.recovery.verdict import Judgement


def failure_of(
    evidence: Evidence,
    judgement: Judgement,
    decision: Decision,
    *,
    detect_s: float | None,
    world_size: int,
) -> Failure:
    """Return the failure for its event. The cost of the recovery is null: the ``recovered`` event
    reports it."""
    return Failure(
        at=datetime.fromtimestamp(evidence.noticed_at, UTC),
        attempt=evidence.attempt,
        verdict=judgement.verdict,
        first_rank=judgement.first_rank,
        node_id=judgement.node_id,
        step=judgement.step,
        exception=judgement.exception,
        evidence=judgement.detail,
        action=decision.action,
        budget=decision.budget,
        steps_lost=None,
        detect_s=detect_s,
        recovery_s=None,
        world_size_before=world_size or None,
        world_size_after=None,
    )
