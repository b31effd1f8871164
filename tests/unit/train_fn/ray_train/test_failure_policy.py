"""Which hosts serve the attempt after a failure, and what follows if it cannot be judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from everstep.wire import ErrorKind
from train_fn.ray_train.failure_policy import EvidencePolicy
from train_fn.ray_train.ray_internals import FailureDecision
from train_fn.recovery.evidence import RankError, RankReport


def report(rank: int, *, left: int | None, kept: int | None = None) -> RankReport:
    error = RankError(rank, ErrorKind.COLLECTIVE, "E", "gone", "", 7, "step", 1.0, left)
    return RankReport(rank, "a", 100 + rank, kept_step=kept, error=error if kept is None else None)


def test_hosts_stay_and_are_known_by_what_their_ranks_have_left() -> None:
    kept: list[dict[int, int]] = []
    group = SimpleNamespace(keep_hosts=kept.append)
    policy: Any = SimpleNamespace(
        _current_group=lambda: group, _groups=SimpleNamespace(keeps_hosts=True)
    )
    reports = (report(0, left=7), report(1, left=None), report(2, left=None, kept=6))
    EvidencePolicy._keep_hosts(policy, reports)
    assert kept == [{0: 7, 2: 6}]
    policy._groups.keeps_hosts = False  # the user's code runs in their processes
    EvidencePolicy._keep_hosts(policy, reports)
    assert len(kept) == 1


def test_failures_that_cannot_be_judged_restart_so_many_times_in_a_row_only() -> None:
    made: Any = SimpleNamespace(_num_unjudged=0, _settings=SimpleNamespace(no_progress_limit=3))
    made._decide = lambda is_judged: FailureDecision.RETRY if is_judged else 1 / 0
    decisions = [EvidencePolicy.make_decision(made, each).name for each in (0, 0, 1, 0, 0, 0)]
    assert decisions == ["RETRY"] * 5 + ["RAISE"]
