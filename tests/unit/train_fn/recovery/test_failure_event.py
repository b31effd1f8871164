"""The failure event: what is known when a failure is reported, and what is not yet."""

from __future__ import annotations

from everstep.wire import Verdict
from train_fn.recovery.decision import Decision
from train_fn.recovery.evidence import Evidence
from train_fn.recovery.outcome import failure_of
from train_fn.recovery.verdict import Judgement


def test_a_failure_before_any_rank_started_has_no_world_size() -> None:
    evidence = Evidence(3, 1_700_000_000.0)
    judgement = Judgement(Verdict.CONTROL_PLANE, None, None, None, "it was lost", None)
    decision = Decision(True, "control_plane", "restart at once")
    sizes = [
        failure_of(evidence, judgement, decision, detect_s=None, world_size=size).world_size_before
        for size in (0, 2)
    ]
    assert sizes == [None, 2]
    found = failure_of(evidence, judgement, decision, detect_s=1.5, world_size=2)
    assert (found.attempt, found.at.timestamp(), found.detect_s) == (3, 1_700_000_000.0, 1.5)
    assert (found.action, found.budget) == ("restart at once", "control_plane")
    cost = (found.steps_lost, found.recovery_s, found.world_size_after)
    assert cost == (None, None, None), "the recovery has not happened"
