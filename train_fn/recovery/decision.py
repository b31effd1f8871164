"""Decide what follows a verdict: restart now, restart later, pause, or fail the run.

Pure functions: the verdict is made by ``verdict.judge``, the earlier failures are read from the
run's journals by ``history``, and the controller carries the decision out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from everstep.spec.sections import CheckpointSpec, RecoverySpec
from everstep.wire import ErrorKind, Failure, ReasonCode, Verdict
from everstep.wire.events import GPU_FAULTY
from train_fn.recovery.evidence import Evidence
from train_fn.recovery.links import (
    ENDED_AFTER,
    WHAT_TO_CHECK,
    Pairs,
    node_to_move,
    times_in_a_row,
    words,
)
from train_fn.recovery.verdict import Judgement

BUDGET_OF = {
    Verdict.USER_ERROR: "user_errors",
    Verdict.PREEMPTION: "preemptions",
    Verdict.CONTROL_PLANE: "control_plane",
    Verdict.STORAGE: "storage",
}
"""The budget that each verdict is charged to; all others are charged to ``system_failures``.

Only ``user_errors`` and ``system_failures`` can run out. A preemption, or trouble of the control
plane or the storage, is not the run's fault: the run retries with a growing backoff."""


SCRIPT_PROGRESS_S = 300.0
"""A script that reports no steps is taken to make progress once it has run for so many seconds."""
_START_PHASES = frozenset({"start", "restore"})
_TOO_SMALL_STARTS = 3
"""So many starts in a row that ran out of a GPU's memory, and one more, are the model's doing."""


@dataclass(frozen=True)
class PastFailure:
    """The part of an earlier failure that later decisions need."""

    verdict: Verdict
    step: int | None
    signature: str | None = None
    node_id: str | None = None
    pairs: Pairs = frozenset()
    worked_s: float | None = None
    """How long a script that reports no steps had been running; None for other runs."""

    @property
    def made_progress(self) -> bool:
        """Return whether a script had been running long enough to have moved."""
        return _ran_long(self.worked_s)


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
    budget = BUDGET_OF.get(judgement.verdict, "system_failures")
    if judgement.verdict is Verdict.USER_ERROR:
        return _decide_user_error(judgement, past, spec)
    if judgement.verdict is Verdict.PREEMPTION:
        return Decision(restart=True, budget=budget, action="restart on the remaining nodes")
    if judgement.kind is ErrorKind.STORAGE_NOT_SHARED and not judgement.step:
        # After the first step it means that a node lost its mount, which is worth waiting for.
        return Decision(
            False,
            budget,
            "stop",
            reason=ReasonCode.STORAGE_UNAVAILABLE,
            message=judgement.exception,
        )
    if _gpu_is_too_small(judgement, past):
        message = (
            f"the GPU ran out of memory again {_place(judgement)}; lower "
            "train.micro_batch_size, which changes no result "
            f"but BatchNorm's, or set train.precision to bf16: {judgement.exception}"
        )
        return Decision(False, budget, "stop", reason=ReasonCode.USER_ERROR, message=message)
    if _is_the_programs_own(judgement, past):
        message = (
            f"the same error of the device {_place(judgement)} on two nodes, and neither shows a "
            f"fault of its hardware; look for a kernel that reads or writes where it must not, "
            f"with CUDA_LAUNCH_BLOCKING=1 in env: {judgement.exception}"
        )
        return Decision(False, budget, "stop", reason=ReasonCode.USER_ERROR, message=message)
    moved = _node_to_move(judgement, past, dispensable)
    if moved is None and (stop := _cannot_meet(judgement, past, budget)) is not None:
        return stop
    in_a_row = 1 + _failures_without_progress(judgement, budget, past)
    backoff_s = min(backoff_max_s, 0.5 * 2 ** min(in_a_row - 3, 16)) if in_a_row > 2 else 0.0
    if judgement.verdict is Verdict.STORAGE:
        return _decide_storage(judgement, in_a_row, backoff_s, checkpoint)
    if judgement.verdict is not Verdict.CONTROL_PLANE:
        stop = _exhausted(judgement, budget, in_a_row, spec, no_progress_limit)
        if stop is not None:
            return stop
    when = "at once" if backoff_s == 0 else f"after {backoff_s:g} s"
    where = "on what is alive" if moved is None else f"without node {moved[:8]}"
    if moved is not None and judgement.verdict is Verdict.HARDWARE:
        where = "elsewhere"
    action = f"restart {when}" if backoff_s and moved is None else f"restart {when} {where}"
    return Decision(True, budget, action, backoff_s, leave_out=moved)


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


def _decide_user_error(
    judgement: Judgement, past: Sequence[PastFailure], spec: RecoverySpec
) -> Decision:
    budget = BUDGET_OF[Verdict.USER_ERROR]
    earlier = [failure for failure in past if failure.verdict is Verdict.USER_ERROR]
    if not _ran_long(judgement.detail.get("worked_s")) and any(
        failure.step == judgement.step
        and failure.signature == judgement.signature
        and not failure.made_progress
        for failure in earlier
    ):
        message = f"the same error {_place(judgement)} twice: {judgement.exception}"
        return Decision(False, budget, "stop", reason=ReasonCode.USER_ERROR, message=message)
    if len(earlier) >= spec.max_user_errors:
        message = (
            f"user code raised {len(earlier) + 1} times, recovery.max_user_errors is "
            f"{spec.max_user_errors}: {judgement.exception}"
        )
        return Decision(False, budget, "stop", reason=ReasonCode.USER_ERROR, message=message)
    return Decision(
        True, budget, f"restart, user error {len(earlier) + 1} of at most {spec.max_user_errors}"
    )


def _decide_storage(
    judgement: Judgement, in_a_row: int, backoff_s: float, checkpoint: CheckpointSpec | None
) -> Decision:
    """Wait for the storage, or pause if the spec prefers that. The run never fails for it: nothing
    of its own is wrong."""
    budget = BUDGET_OF[Verdict.STORAGE]
    if (
        checkpoint is not None
        and checkpoint.on_failed_saves == "pause"
        and in_a_row >= checkpoint.max_failed_saves
    ):
        message = (
            f"paused after {in_a_row} storage failures in a row {_place(judgement)} "
            "(checkpoint.on_failed_saves is pause); "
            f"repair the storage, then resume the run. The last failure: {judgement.exception}"
        )
        return Decision(
            False,
            budget,
            "pause",
            reason=ReasonCode.STORAGE_UNAVAILABLE,
            message=message,
            pause=True,
        )
    pause = "at once" if backoff_s == 0 else f"after {backoff_s:g} s"
    return Decision(
        True,
        budget,
        f"wait for the storage, restart {pause} (failure {in_a_row} in a row)",
        backoff_s,
    )


def _exhausted(
    judgement: Judgement, budget: str, in_a_row: int, spec: RecoverySpec, no_progress_limit: int
) -> Decision | None:
    """Return the decision to fail the run if its system failures exceed a limit, else None."""
    if in_a_row > spec.max_system_failures:
        message = (
            f"{in_a_row} system failures in a row without progress exceed "
            "recovery.max_system_failures "
            f"{spec.max_system_failures}; the last was {_last(judgement)}"
        )
        code = ReasonCode.SYSTEM_FAILURES_EXHAUSTED
        return Decision(False, budget, "stop", reason=code, message=message)
    if in_a_row >= no_progress_limit:
        message = (
            f"{in_a_row} attempts in a row failed before one new step; the last failure was "
            f"{_last(judgement)}"
        )
        return Decision(False, budget, "stop", reason=ReasonCode.NO_PROGRESS, message=message)
    return None


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
    if judgement.verdict is Verdict.HARDWARE:
        return judgement.node_id if judgement.node_id in dispensable() else None
    if not judgement.pairs or judgement.verdict is Verdict.CONTROL_PLANE:
        return None
    return node_to_move(judgement.pairs, [failure.pairs for failure in past], dispensable())


def _cannot_meet(judgement: Judgement, past: Sequence[PastFailure], budget: str) -> Decision | None:
    """Return the decision to fail a run whose nodes repeatedly do not hear each other, else
    None."""
    if not judgement.pairs:
        return None
    earlier = [(failure.pairs, failure.step) for failure in past]
    times = times_in_a_row(judgement.pairs, earlier, judgement.step)
    if times < ENDED_AFTER:
        return None
    message = (
        f"{words(judgement.pairs)}: {times} attempts in a row failed for it, and no other node has "
        f"room. {WHAT_TO_CHECK}"
    )
    return Decision(False, budget, "stop", reason=ReasonCode.NO_PROGRESS, message=message)


def _gpu_is_too_small(judgement: Judgement, past: Sequence[PastFailure]) -> bool:
    """Return whether a GPU ran out of memory at the same place before.

    A host's memory is shared with other processes and may suffice the next time; a GPU's is not.
    Only while an attempt starts, a dead rank may still hold it: there it takes several in a row.
    """
    if judgement.kind is not ErrorKind.DEVICE_MEMORY:
        return False
    same = [
        (failure.verdict, failure.step, failure.signature)
        == (judgement.verdict, judgement.step, judgement.signature)
        for failure in past
    ]
    if judgement.detail.get("phase") in _START_PHASES:
        return len(same) >= _TOO_SMALL_STARTS and all(same[-_TOO_SMALL_STARTS:])
    return any(same)


def _is_the_programs_own(judgement: Judgement, past: Sequence[PastFailure]) -> bool:
    """Return whether an error of the device followed the run to another node: a broken GPU does
    not."""
    if judgement.verdict is not Verdict.HARDWARE or GPU_FAULTY in (judgement.exception or ""):
        return False
    return any(
        failure.verdict is Verdict.HARDWARE
        and (failure.step, failure.signature) == (judgement.step, judgement.signature)
        and failure.node_id != judgement.node_id
        for failure in past
    )


def _failures_without_progress(
    judgement: Judgement, budget: str, past: Sequence[PastFailure]
) -> int:
    """Return how many earlier failures of the same budget follow the last one at a smaller step.

    A failure whose step is unknown counts at the step of the failure before it: as step 0 it would
    look like a step back. A script that reports no steps moves on by running for long.
    """
    if _ran_long(judgement.detail.get("worked_s")):
        return 0
    steps: list[int] = []
    for known in (*(failure.step for failure in past), judgement.step):
        steps.append(known if known is not None else steps[-1] if steps else 0)
    count = 0
    for failure, step in zip(reversed(past), reversed(steps[:-1]), strict=True):
        if BUDGET_OF.get(failure.verdict, "system_failures") != budget:
            continue
        if steps[-1] > step:
            break
        count += 1
        if failure.made_progress:
            break
    return count


def _ran_long(worked_s: float | None) -> bool:
    return worked_s is not None and worked_s >= SCRIPT_PROGRESS_S


def _last(judgement: Judgement) -> str:
    """Return the verdict, and for a hang what the limit was and how to raise it."""
    is_hang = judgement.verdict is Verdict.HANG and judgement.exception
    return f"{judgement.verdict}: {judgement.exception}" if is_hang else f"{judgement.verdict}"


def _place(judgement: Judgement) -> str:
    if judgement.step is None and "worked_s" in judgement.detail:
        return f"of a script that had run for {judgement.detail['worked_s']:.1f} s"
    return "before the first step" if judgement.step is None else f"at step {judgement.step}"
