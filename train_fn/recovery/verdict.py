"""What a failure was and what is done about it: pure rules over evidence.

``judge`` names the first failing rank and gives the verdict, ``decide`` weighs it against the
budgets. Neither asks anyone anything; the evidence is gathered by ray_train, the past is folded
from the run's journals by recovery/history.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from everstep.spec.sections import CheckpointSpec, RecoverySpec
from everstep.wire import ErrorKind, Failure, ReasonCode, Verdict
from train_fn.recovery.error_kinds import VERDICT_OF_KIND, kind_of_death
from train_fn.recovery.rank_error import RankError

BUDGET_OF = {
    Verdict.USER_ERROR: "user_errors",
    Verdict.PREEMPTION: "preemptions",
    Verdict.CONTROL_PLANE: "control_plane",
    Verdict.STORAGE: "storage",
}
"""Budget that a verdict is charged to; all others are ``system_failures``. Only ``user_errors`` and
``system_failures`` can be exhausted: a preemption and trouble of the control plane or of the
storage say nothing about the run, which waits longer each time."""


@dataclass(frozen=True)
class RankReport:
    """What is known of one rank once its group has settled."""

    rank: int
    node_id: str
    pid: int
    node_alive: bool = True
    """Whether its node's raylet accepted a connection."""
    node_draining: bool = False
    died: bool = False
    """Its process is gone, and not by our hand."""
    death: str | None = None
    """Ray's words for that."""
    preempted: bool = False
    """Ray says that its node was taken away as announced."""
    unresponsive: bool = False
    """Its process lives but answers nothing: stopped, or stuck outside Python."""
    stack: str | None = None
    """Where it stood when it was taken for hung."""
    still_running: bool = False
    """Its training thread had not ended when the wait for it was over."""
    held_up: bool = False
    """It then waited for others inside a collective: one of which it has not heard yet that it will
    not come about."""
    error: RankError | None = None


@dataclass(frozen=True)
class Evidence:
    """One failure of an attempt: what every rank said, or why the group could not even start."""

    attempt: int
    noticed_at: float
    """Unix seconds."""
    ranks: tuple[RankReport, ...] = ()
    last_step: int | None = None
    """Most steps done that any rank or the journal knows of."""
    control_error: str | None = None
    """An error of the controller itself or of the group's start, not of a training function."""


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    first_rank: int | None
    node_id: str | None
    step: int | None
    """Steps done; None where nobody knew yet where the run was."""
    exception: str | None
    signature: str | None
    """Equal for two occurrences of one bug."""
    kind: ErrorKind | None = None
    """Of the first rank's error; None where it raised none."""
    detail: dict[str, Any] = field(default_factory=dict)
    """The evidence as the failure event shows it."""


@dataclass(frozen=True)
class PastFailure:
    """What later decisions need of an earlier failure of the run."""

    verdict: Verdict
    step: int | None
    signature: str | None = None


@dataclass(frozen=True)
class Decision:
    """``restart`` after ``backoff_s``, or stop the run for ``reason``: as FAILED, or with ``pause``
    as PAUSED."""

    restart: bool
    budget: str
    action: str
    backoff_s: float = 0.0
    reason: ReasonCode | None = None
    message: str | None = None
    pause: bool = False


def judge(evidence: Evidence) -> Judgement:
    """The verdict on one failure.

    A dead process outweighs any exception: what its peers raise, recognised or not, follows from
    its death. Among ranks that raised by themselves the earliest is first. Errors of collectives
    only follow from another rank's end and are never blamed.
    """
    dead = sorted((r for r in evidence.ranks if r.died), key=lambda r: (r.node_alive, r.rank))
    stuck = [r for r in evidence.ranks if r.unresponsive]
    raised = sorted(
        (r for r in evidence.ranks if r.error and not r.error.collateral), key=_raised_at
    )
    if dead:
        return _judgement(evidence, dead[0], _death_verdict(dead[0]))
    if stuck:
        return _judgement(evidence, stuck[0], Verdict.HANG)
    if raised:
        error = raised[0].error
        assert error is not None
        return _judgement(evidence, raised[0], VERDICT_OF_KIND[error.kind])
    draining = [r for r in evidence.ranks if r.node_draining]
    if draining:
        return _judgement(evidence, draining[0], Verdict.PREEMPTION)
    if evidence.control_error is not None:
        return _judgement(evidence, None, Verdict.CONTROL_PLANE)
    hung = [r for r in evidence.ranks if r.still_running and not r.held_up]
    if hung and any(r.error for r in evidence.ranks):
        # Everyone else left a failed collective; who stayed behind is what they were waiting for.
        return _judgement(evidence, hung[0], Verdict.HANG)
    return _judgement(evidence, None, Verdict.UNKNOWN)


def decide(
    judgement: Judgement,
    past: Sequence[PastFailure],
    spec: RecoverySpec,
    *,
    no_progress_limit: int,
    backoff_max_s: float,
    checkpoint: CheckpointSpec | None = None,
) -> Decision:
    """Decide whether the run goes on after ``judgement``, given its earlier failures, oldest first.

    Args:
        checkpoint: says whether trouble of the storage pauses the run, and after how many failures;
            None never pauses it.
    """
    budget = BUDGET_OF.get(judgement.verdict, "system_failures")
    if judgement.verdict is Verdict.USER_ERROR:
        return _decide_user_error(judgement, past, spec)
    if judgement.verdict is Verdict.PREEMPTION:
        return Decision(restart=True, budget=budget, action="restart on the remaining nodes")
    if judgement.kind is ErrorKind.STORAGE_NOT_SHARED and not judgement.step:
        # Of a run that has trained, a node has lost its mount: that is trouble of the storage as
        # any other.
        return Decision(
            False,
            budget,
            "stop",
            reason=ReasonCode.STORAGE_UNAVAILABLE,
            message=judgement.exception,
        )
    if _gpu_is_too_small(judgement, past):
        message = (
            f"the GPU's memory was too small {_place(judgement)} twice; lower "
            "train.micro_batch_size, which changes no result "
            f"but BatchNorm's, or set train.precision to bf16: {judgement.exception}"
        )
        return Decision(False, budget, "stop", reason=ReasonCode.USER_ERROR, message=message)
    in_a_row = 1 + _failures_without_progress(judgement, budget, past)
    backoff_s = min(backoff_max_s, 0.5 * 2 ** min(in_a_row - 3, 16)) if in_a_row > 2 else 0.0
    action = (
        "restart at once on what is alive" if backoff_s == 0 else f"restart after {backoff_s:g} s"
    )
    if judgement.verdict is Verdict.CONTROL_PLANE:
        return Decision(True, budget, action, backoff_s)
    if judgement.verdict is Verdict.STORAGE:
        return _decide_storage(judgement, in_a_row, backoff_s, checkpoint)
    if in_a_row > spec.max_system_failures:
        message = (
            f"{in_a_row} system failures in a row without progress exceed "
            "recovery.max_system_failures "
            f"{spec.max_system_failures}; the last was {judgement.verdict}"
        )
        return Decision(
            False, budget, "stop", reason=ReasonCode.SYSTEM_FAILURES_EXHAUSTED, message=message
        )
    if in_a_row >= no_progress_limit:
        message = (
            f"{in_a_row} attempts in a row failed before one new step; the last failure was "
            f"{judgement.verdict}"
        )
        return Decision(False, budget, "stop", reason=ReasonCode.NO_PROGRESS, message=message)
    return Decision(True, budget, action, backoff_s)


def failure_of(
    evidence: Evidence,
    judgement: Judgement,
    decision: Decision,
    *,
    detect_s: float | None,
    world_size: int,
) -> Failure:
    """Return the failure as its event tells it; what only the recovery shows follows with its own
    event."""
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
    if any(
        failure.step == judgement.step and failure.signature == judgement.signature
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
    """Wait for the storage, or pause where the spec prefers that. Nothing of the run's own is
    wrong, so it never fails."""
    budget = BUDGET_OF[Verdict.STORAGE]
    if (
        checkpoint is not None
        and checkpoint.on_failed_saves == "pause"
        and in_a_row >= checkpoint.max_failed_saves
    ):
        message = (
            f"paused after {in_a_row} failures of the storage in a row {_place(judgement)} "
            "(checkpoint.on_failed_saves is pause); "
            f"mend the storage, then resume the run. The last failure: {judgement.exception}"
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


def _gpu_is_too_small(judgement: Judgement, past: Sequence[PastFailure]) -> bool:
    """Whether a GPU ran out of memory where it did before. A host's memory is shared with others,
    and may suffice the next time."""
    return judgement.kind is ErrorKind.DEVICE_MEMORY and any(
        (failure.verdict, failure.step, failure.signature)
        == (judgement.verdict, judgement.step, judgement.signature)
        for failure in past
    )


def _failures_without_progress(
    judgement: Judgement, budget: str, past: Sequence[PastFailure]
) -> int:
    """Earlier failures of the same budget after the last one that lay at a smaller step.

    One that came before it was known where the run is lies where the failure before it did: it is
    no step back.
    """
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
    return count


def _place(judgement: Judgement) -> str:
    return "before the first step" if judgement.step is None else f"at step {judgement.step}"


def _raised_at(report: RankReport) -> tuple[float, int]:
    assert report.error is not None
    return report.error.at, report.rank


def _death_verdict(report: RankReport) -> Verdict:
    if report.preempted or report.node_draining:
        return Verdict.PREEMPTION
    if not report.node_alive:
        return Verdict.NODE_LOST
    kind = kind_of_death(report.death)
    return Verdict.WORKER_LOST if kind is None else VERDICT_OF_KIND[kind]


def _judgement(evidence: Evidence, first: RankReport | None, verdict: Verdict) -> Judgement:
    error = first.error if first else None
    exception = error.summary if error else evidence.control_error
    if first is not None and error is None:
        exception = None
    return Judgement(
        verdict=verdict,
        first_rank=first.rank if first else None,
        node_id=first.node_id if first else None,
        step=error.step if error and error.step is not None else evidence.last_step,
        exception=exception,
        signature=error.signature if error else None,
        kind=error.kind if error else None,
        detail=_detail(evidence, first),
    )


def _detail(evidence: Evidence, first: RankReport | None) -> dict[str, Any]:
    """JSON-ready evidence: the first rank in full, every other in a line."""
    detail: dict[str, Any] = {"ranks": [_line(report) for report in evidence.ranks]}
    if evidence.control_error:
        detail["control_error"] = evidence.control_error[-4000:]
    if first is not None:
        detail["pid"] = first.pid
        detail["node_alive"] = first.node_alive
        if first.stack:
            detail["stack"] = first.stack[-8000:]
        if first.death:
            detail["death"] = first.death[-4000:]
        if first.error:
            detail["kind"] = first.error.kind.value
            detail["signature"] = first.error.signature
            detail["traceback"] = first.error.traceback
            detail["phase"] = first.error.phase
            if first.error.place:
                detail["place"] = first.error.place
            if first.error.memory:
                detail["memory"] = first.error.memory[-8000:]
    return detail


def _line(report: RankReport) -> dict[str, Any]:
    error = report.error
    if report.died:
        state = "died"
    elif report.unresponsive:
        state = "unresponsive"
    elif report.still_running:
        state = "held up" if report.held_up else "still running"
    elif error is None:
        state = "left"
    else:
        state = "collateral" if error.collateral else "raised"
    return {
        "rank": report.rank,
        "node_id": report.node_id,
        "state": state,
        "error": error.summary[:500] if error else None,
        "step": error.step if error else None,
        "snapshot_step": error.snapshot_step if error else None,
        "at": error.at if error else None,
        **({"stack": report.stack[-4000:]} if report.stack else {}),
    }
