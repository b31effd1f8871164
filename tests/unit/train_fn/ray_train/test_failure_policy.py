"""Which hosts serve the attempt after a failure, and what follows if it cannot be judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from train_fn.ray_train.failure_policy import EvidencePolicy
from train_fn.ray_train.ray_internals import FailureDecision


def test_failures_that_cannot_be_judged_restart_so_many_times_in_a_row_only() -> None:
    spec = SimpleNamespace(recovery=SimpleNamespace(max_system_failures=2))
    made: Any = SimpleNamespace(_num_unjudged=0, _spec=spec)
    made._decide = lambda is_judged: FailureDecision.RETRY if is_judged else 1 / 0
    decisions = [EvidencePolicy.make_decision(made, each).name for each in (0, 0, 1, 0, 0, 0)]
    assert decisions == ["RETRY"] * 5 + ["RAISE"]
