"""Who keeps its process after a failure, and which failures only show that it should not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.wire import ErrorKind, ReasonCode, Verdict
from train_fn.ray_train.failure_policy import EvidencePolicy
from train_fn.recovery.decision import Decision
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.rank_error import RankError
from train_fn.recovery.staying import SOON_WRITTEN_BYTES, ranks_to_insure, stays_in_process


def policy(group: Any, *, has_stepped: bool = False, in_process: bool = True) -> Any:
    return SimpleNamespace(
        _current_group=lambda: group,
        _groups=SimpleNamespace(in_process=in_process),
        _attempt_log=SimpleNamespace(has_stepped=has_stepped),
    )


@pytest.mark.parametrize(
    ("verdict", "num_stayed", "has_stepped", "falls"),
    [
        (Verdict.USER_ERROR, 1, False, True),
        (Verdict.UNKNOWN, 1, False, True),
        (Verdict.HANG, 1, False, True),
        (Verdict.USER_ERROR, 0, False, False),
        (Verdict.USER_ERROR, 1, True, False),
        (Verdict.WORKER_LOST, 1, False, False),
        (Verdict.NODE_LOST, 1, False, False),
    ],
)
def test_what_fails_before_a_step_where_ranks_stayed_is_tried_in_fresh_processes(
    verdict: Verdict, num_stayed: int, has_stepped: bool, falls: bool
) -> None:
    own = policy(SimpleNamespace(num_stayed=num_stayed), has_stepped=has_stepped)
    found = EvidencePolicy._falls_back(own, SimpleNamespace(verdict=verdict))  # type: ignore[arg-type]
    assert found is falls


def report(rank: int, kind: ErrorKind = ErrorKind.COLLECTIVE, **facts: Any) -> RankReport:
    """A rank that left with its state of step 7 in its process, unless ``facts`` say otherwise."""
    snapshot_step = facts.pop("snapshot_step", None)
    error = RankError(rank, kind, "E", "gone", "", 7, "step", 1.0, snapshot_step=snapshot_step)
    return RankReport(
        rank, facts.pop("node_id", "a"), 100 + rank, **{"error": error, "stays_at": 7, **facts}
    )


def test_ranks_that_merely_lost_a_peer_keep_their_processes() -> None:
    kept: dict[int, int] = {}
    group = SimpleNamespace(keep=lambda steps, insured: kept.update(steps))
    reports = (
        report(0),
        report(1, stays_at=None, snapshot_step=6),  # its state is on its node
        report(2, ErrorKind.USER),
        report(3, ErrorKind.DEVICE),
        report(4, died=True),
        report(5, unresponsive=True),
        report(6, still_running=True),
        report(7, node_alive=False),
        report(8, stays_at=None),  # it has no state that could be used
        report(9, error=None),
    )
    EvidencePolicy._keep_survivors(policy(group), reports)
    assert kept == {0: 7, 1: 6}
    kept.clear()
    EvidencePolicy._keep_survivors(policy(group, in_process=False), reports)
    assert kept == {}


def test_one_rank_of_each_node_writes_the_state_that_it_keeps() -> None:
    """A process that dies in the next start must not take the only copy with it."""
    large = SOON_WRITTEN_BYTES + 1
    two = [report(0), report(1), report(2, node_id="b"), report(3, node_id="c", stays_at=6)]
    assert ranks_to_insure(two) == [0, 2], "those that have the newest step"
    assert ranks_to_insure([report(0, ErrorKind.USER), *two[1:]]) == [1, 2]
    assert ranks_to_insure([report(0, state_bytes=large)]) == [0], "the only copy, large or not"
    assert ranks_to_insure([report(0, state_bytes=large), report(1, state_bytes=large)]) == []
    assert ranks_to_insure([report(0, stays_at=None, snapshot_step=7)]) == [], "it is written"
    assert ranks_to_insure([]) == []


@pytest.mark.parametrize(
    ("verdict", "decision", "stays"),
    [
        (Verdict.NODE_LOST, Decision(True, "system_failures", "restart"), True),
        (Verdict.NODE_LOST, Decision(True, "system_failures", "restart", backoff_s=0.5), False),
        (Verdict.SILENT_CORRUPTION, Decision(True, "system_failures", "restart"), False),
        (
            Verdict.USER_ERROR,
            Decision(False, "user_errors", "stop", reason=ReasonCode.USER_ERROR),
            False,
        ),
    ],
)
def test_processes_stay_for_an_attempt_that_follows_at_once_on_sound_states(
    verdict: Verdict, decision: Decision, stays: bool
) -> None:
    judgement: Any = SimpleNamespace(verdict=verdict)
    assert stays_in_process(judgement, decision) is stays
