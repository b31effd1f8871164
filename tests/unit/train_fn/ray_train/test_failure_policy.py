"""Who keeps its process after a failure, and which failures only show that it should not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.wire import ErrorKind, ReasonCode, Verdict
from everstep.wire.events import GPU_FAULTY
from train_fn.ray_train.failure_policy import EvidencePolicy
from train_fn.ray_train.ray_internals import FailureDecision
from train_fn.recovery.decision import Decision, PastFailure
from train_fn.recovery.evidence import RankError, RankReport
from train_fn.recovery.staying import (
    SOON_WRITTEN_BYTES,
    Outliving,
    falls_back,
    ranks_to_insure,
    stays_in_process,
    why_not_to_stay,
)
from train_fn.recovery.verdict import Judgement


def policy(group: Any, *, in_process: bool = True) -> Any:
    return SimpleNamespace(
        _current_group=lambda: group, _groups=SimpleNamespace(in_process=in_process)
    )


PAST = PastFailure(Verdict.USER_ERROR, 7, "Boom")


@pytest.mark.parametrize(
    ("verdict", "kind", "facts", "has_stayed", "has_stepped", "falls"),
    [
        (Verdict.USER_ERROR, ErrorKind.USER, {}, True, False, True),
        (Verdict.USER_ERROR, ErrorKind.USER, {}, True, True, True),
        (Verdict.USER_ERROR, ErrorKind.USER, {}, False, False, False),
        (Verdict.USER_ERROR, ErrorKind.USER, {"signature": "Boom"}, True, True, False),
        (Verdict.USER_ERROR, ErrorKind.USER, {"signature": "Boom", "step": 8}, True, True, True),
        (Verdict.SILENT_CORRUPTION, ErrorKind.CORRUPTION, {}, True, True, True),
        (Verdict.SILENT_CORRUPTION, ErrorKind.CORRUPTION, {}, False, True, False),
        (Verdict.UNKNOWN, ErrorKind.EXCHANGE, {}, True, True, True),
        (Verdict.UNKNOWN, None, {}, True, False, True),
        (Verdict.UNKNOWN, None, {}, True, True, True),
        (Verdict.UNKNOWN, None, {"pairs": frozenset({("a", "b")})}, True, True, False),
        (Verdict.HANG, None, {}, True, False, True),
        (Verdict.HANG, None, {"detail": {"stack": "in barrier"}}, True, True, True),
        (Verdict.HANG, None, {}, True, True, False),
        (Verdict.HARDWARE, ErrorKind.DEVICE, {}, True, True, True),
        (Verdict.HARDWARE, ErrorKind.DEVICE, {"exception": GPU_FAULTY}, True, True, False),
        (Verdict.OUT_OF_MEMORY, ErrorKind.DEVICE_MEMORY, {}, True, True, True),
        (Verdict.OUT_OF_MEMORY, None, {}, True, True, False),
        (Verdict.STORAGE, ErrorKind.STORAGE, {}, True, True, False),
        (Verdict.WORKER_LOST, None, {}, True, False, False),
        (Verdict.WORKER_LOST, ErrorKind.EXITED, {}, True, True, True),
        (Verdict.WORKER_LOST, ErrorKind.EXITED, {}, False, True, False),
        (Verdict.NODE_LOST, None, {}, True, False, False),
    ],
)
def test_what_a_kept_process_may_have_caused_is_tried_in_fresh_ones_before_anybody_is_blamed(
    verdict: Verdict,
    kind: ErrorKind | None,
    facts: dict[str, Any],
    has_stayed: bool,
    has_stepped: bool,
    falls: bool,
) -> None:
    known = {"first_rank": 0, "node_id": "a", "step": 7, "exception": None, "signature": "Other"}
    judgement = Judgement(verdict, kind=kind, **known | facts)
    assert falls_back(judgement, [PAST], has_stayed=has_stayed, has_stepped=has_stepped) is falls


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
        report(1, stays_at=None, snapshot_step=7),  # its state is on its node
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
    assert kept == {0: 7}
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


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Outliving(), None),
        (Outliving(asked_at="task.py, line 3, in world"), "has asked for its rank or its peers"),
        (Outliving(too_much=True), "more than can be compared"),
        (Outliving(children=("sleep (7)",)), "processes that it has started run on: sleep (7)"),
        (
            Outliving(threads=("Thread-1",)),
            "threads or timers that it has started run on: Thread-1",
        ),
        (Outliving(streams=("sys.stdout",)), "in the place of standard streams"),
        (Outliving(environment=("A",)), "changed the environment since its first pass: A"),
        (Outliving(directory=("/",)), "changed the working directory"),
        (Outliving(signals=("SIGTERM",)), "changed handlers of signals"),
        (Outliving(settings=("sys.path",)), "changed settings of torch, numpy or Python"),
        (Outliving(functions=("torch.sum",)), "replaced functions of libraries"),
        (Outliving(values=("task.STEPS",)), "no state does, has changed since its first pass"),
        (Outliving(values=tuple("abcdefg")), ": a, b, c, d, e and 2 more"),
    ],
)
def test_a_process_stays_only_if_all_that_outlives_the_attempt_in_it_is_known(
    found: Outliving, reason: str | None
) -> None:
    why = why_not_to_stay(found)
    assert why is reason is None or (reason is not None and why is not None and reason in why)


def test_failures_that_cannot_be_judged_restart_so_many_times_in_a_row_only() -> None:
    made: Any = SimpleNamespace(_num_unjudged=0, _settings=SimpleNamespace(no_progress_limit=3))
    made._decide = lambda is_judged: FailureDecision.RETRY if is_judged else 1 / 0
    decisions = [EvidencePolicy.make_decision(made, each).name for each in (0, 0, 1, 0, 0, 0)]
    assert decisions == ["RETRY"] * 5 + ["RAISE"]
