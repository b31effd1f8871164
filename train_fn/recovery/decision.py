"""Decide what follows a verdict: restart now, restart later, pause, or fail the run.

Pure functions: ``verdict.judge`` makes the verdict, ``history`` reads the earlier failures from the
run's journals, and the controller carries the decision out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from everstep.spec.sections import CheckpointSpec, RecoverySpec
from everstep.wire import ReasonCode, Verdict
from train_fn.recovery.links import node_to_move
from train_fn.recovery.past_failures import PastFailure, budget_of, failures_in_a_row
from train_fn.recovery.unrecoverable import (
    RunEnd,
    budget_is_spent,
    device_error_follows,
    gpu_is_too_small,
    nodes_cannot_meet,
    ranks_part_again,
    same_user_error,
    storage_is_not_shared,
    too_many_user_errors,
)
from train_fn.recovery.verdict import Judgement

_FIRST_BACKOFF_S = 0.5
"""Pause before the restart after the third failure in a row; it doubles with each further one."""
_MOST_DOUBLINGS = 16
_OF_A_NODE = frozenset({Verdict.HARDWARE, Verdict.SILENT_CORRUPTION})
"""Verdicts after which the run moves away from the node, if it can."""


@dataclass(frozen=True)
class Decision:
    """``restart`` after ``backoff_s``, or end the submission for ``reason``: the run fails, or is
    paused if ``pause`` is set."""

    restart: bool
    budget: str
    action: str
    backoff_s: float = 0.0
    reason: ReasonCode | None = None
    message: str | None = None
    pause: bool = False
    leave_out: str | None = None
    """Node that gives way to another one for a while."""


def decide(
    judgement: Judgement,
    past: Sequence[PastFailure],
    spec: RecoverySpec,
    *,
    no_progress_limit: int,
    backoff_max_s: float,
    checkpoint: CheckpointSpec | None = None,
    dispensable: Callable[[], Collection[str]] = tuple,
) -> Decision:
    """Decide whether the run goes on after ``judgement``.

    Args:
        judgement: The newest failure.
        past: Earlier failures of the run, oldest first.
        spec: The run's budgets.
        no_progress_limit: Fail the run after so many system failures without a new step.
        backoff_max_s: Longest pause before a restart, in seconds.
        checkpoint: Says whether storage failures pause the run, and after how many. None: never.
        dispensable: Returns the nodes without which the run would still have enough room. Called
            only for an error of a device, and if two nodes do not hear each other.
    """
    verdict = judgement.verdict
    if verdict is Verdict.USER_ERROR:
        return _after_user_error(judgement, past, spec)
    if verdict is Verdict.PREEMPTION:
        return Decision(True, budget_of(verdict), "restart on the remaining nodes")
    end = (
        storage_is_not_shared(judgement)
        or gpu_is_too_small(judgement, past)
        or device_error_follows(judgement, past)
        or ranks_part_again(judgement, past)
    )
    if end is not None:
        return _stop(judgement, end)
    moved = _node_to_move(judgement, past, dispensable)
    if moved is None and (end := nodes_cannot_meet(judgement, past)) is not None:
        return _stop(judgement, end)
    in_a_row = failures_in_a_row(judgement, past)
    backoff_s = backoff(in_a_row, backoff_max_s)
    if verdict is Verdict.STORAGE:
        return _after_storage_failure(judgement, in_a_row, backoff_s, checkpoint)
    if verdict is not Verdict.CONTROL_PLANE:
        end = budget_is_spent(judgement, in_a_row, spec, no_progress_limit)
        if end is not None:
            return _stop(judgement, end)
    action = _restart(verdict, backoff_s, moved)
    return Decision(True, budget_of(verdict), action, backoff_s, leave_out=moved)


def backoff(in_a_row: int, longest_s: float) -> float:
    """Return the pause before a restart in seconds: none after the first two failures in a row,
    then one that doubles with each."""
    if in_a_row <= 2:
        return 0.0
    return min(longest_s, _FIRST_BACKOFF_S * 2.0 ** min(in_a_row - 3, _MOST_DOUBLINGS))


def _stop(judgement: Judgement, end: RunEnd) -> Decision:
    budget = budget_of(judgement.verdict)
    return Decision(False, budget, "stop", reason=end.reason, message=end.message)


def _after_user_error(
    judgement: Judgement, past: Sequence[PastFailure], spec: RecoverySpec
) -> Decision:
    """Restart within the budget of user errors, unless the same error came before."""
    num_earlier = sum(failure.verdict is Verdict.USER_ERROR for failure in past)
    end = same_user_error(judgement, past) or too_many_user_errors(num_earlier, judgement, spec)
    if end is not None:
        return _stop(judgement, end)
    action = f"restart, user error {num_earlier + 1} of at most {spec.max_user_errors}"
    return Decision(True, budget_of(judgement.verdict), action)


def _after_storage_failure(
    judgement: Judgement, in_a_row: int, backoff_s: float, checkpoint: CheckpointSpec | None
) -> Decision:
    """Wait for the storage, or pause if the spec prefers that. The run never fails for it: nothing
    of its own is wrong."""
    budget = budget_of(judgement.verdict)
    pauses = checkpoint is not None and checkpoint.on_failed_saves == "pause"
    if pauses and checkpoint is not None and in_a_row >= checkpoint.max_failed_saves:
        message = (
            f"paused after {in_a_row} storage failures in a row {judgement.place} "
            "(checkpoint.on_failed_saves is pause); "
            f"repair the storage, then resume the run. The last failure: {judgement.exception}"
        )
        reason = ReasonCode.STORAGE_UNAVAILABLE
        return Decision(False, budget, "pause", reason=reason, message=message, pause=True)
    action = f"wait for the storage, restart {_when(backoff_s)} (failure {in_a_row} in a row)"
    return Decision(True, budget, action, backoff_s)


def _node_to_move(
    judgement: Judgement,
    past: Sequence[PastFailure],
    dispensable: Callable[[], Collection[str]],
) -> str | None:
    """Return the node that gives way: that of a device that failed, or one of two that repeatedly
    do not hear each other.

    None if the run cannot do without it, and for a failed start, since the check that found a pair
    excludes one of the two itself.
    """
    if judgement.verdict in _OF_A_NODE:
        return judgement.node_id if judgement.node_id in dispensable() else None
    if not judgement.pairs or judgement.verdict is Verdict.CONTROL_PLANE:
        return None
    return node_to_move(judgement.pairs, [failure.pairs for failure in past], dispensable())


def _restart(verdict: Verdict, backoff_s: float, moved: str | None) -> str:
    """Return a phrase for a restart, and for the node that it avoids."""
    when = _when(backoff_s)
    if moved is None:
        return f"restart {when}" if backoff_s else f"restart {when} on what is alive"
    where = "elsewhere" if verdict in _OF_A_NODE else f"without node {moved[:8]}"
    return f"restart {when} {where}"


def _when(backoff_s: float) -> str:
    return f"after {backoff_s:g} s" if backoff_s else "at once"
