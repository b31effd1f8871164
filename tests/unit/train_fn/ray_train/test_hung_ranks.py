"""What is reported of ranks that were killed because they hung."""

from __future__ import annotations

import pytest

from everstep.wire import Verdict
from train_fn.ray_train.hung_ranks import HungRanks
from train_fn.recovery.evidence import Evidence, RankReport
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.verdict import judge


@pytest.mark.parametrize(
    ("node_alive", "verdict"), [(True, Verdict.HANG), (False, Verdict.NODE_LOST)]
)
def test_a_rank_that_was_killed_for_a_hang_on_a_node_that_does_not_answer_is_a_lost_node(
    node_alive: bool, verdict: Verdict
) -> None:
    """A host that is cut off: nobody knows whether its rank hung, or was killed at all."""
    why = "set recovery.hang_timeout_s to more"
    hung = HungRanks(RecoverySettings().health_timeout_s)
    hung._ranks, hung._stacks, hung._reason = [1], {0: "waits", 1: None}, why
    killed = RankReport(1, "b", 101, died=True, death="killed by ray.kill", node_alive=node_alive)
    ranks = (RankReport(0, "a", 100), hung.explain(killed))
    judgement = judge(Evidence(attempt=1, noticed_at=50.0, ranks=ranks))
    assert (judgement.verdict, judgement.first_rank) == (verdict, 1)
    assert judgement.exception == (why if node_alive else None)
    assert "death" not in judgement.detail
