"""How a run ends (by its user, its deadline, a verdict, its last step), and what a failure's
event says.
"""

from __future__ import annotations

from datetime import UTC, datetime

from everstep.wire import Failure, ReasonCode
from storage.run_control import Stop
from train_fn.recovery.decision import MICRO_BATCH_SIZE, Decision
from train_fn.recovery.evidence import Evidence
from train_fn.recovery.launch import ControllerOutcome
from train_fn.recovery.verdict import Judgement


class Stopping:
    """Decides the stop that the ranks receive: the user's or the deadline's, whichever came
    first."""

    def __init__(self, deadline_at: float | None) -> None:
        """Watch for the deadline at ``deadline_at`` (unix seconds).

        None for a run without a deadline, or one whose steps are all done.
        """
        self._deadline_at = deadline_at
        self.asked: Stop | None = None
        """The stop that the user requested."""
        self.overdue = False
        """Whether the deadline passed before the user requested a stop."""

    def decide(self, asked: Stop | None, now: float) -> Stop | None:
        """Return the stop that the ranks should receive now.

        Args:
            asked: The user's request so far, if the run directory could be read.
            now: Unix seconds.
        """
        if not self.overdue:
            self.asked = asked or self.asked
            self.overdue = (
                self.asked is None and self._deadline_at is not None and now >= self._deadline_at
            )
        return "cancel" if self.overdue else self.asked


def unfinished(step: int, total_steps: int | None) -> str | None:
    """Return why a run whose ranks have all returned, unasked, has not succeeded; None if it has.

    Args:
        step: Steps done.
        total_steps: Steps of the whole run, as a rank has last reported them; None if none has.
    """
    if total_steps is None or step >= total_steps:
        return None
    return (
        f"the code returned at step {step} of {total_steps}, and nobody had asked the run to stop: "
        "it may have caught the exception that ended its loop. Let exceptions pass, and end a loop "
        "early by `break`; then start a run from its newest checkpoint"
    )


def ending(
    outcome: ControllerOutcome, *, overdue: bool, by_itself: bool = False, kept: str | None = None
) -> tuple[str, dict[str, str] | None]:
    """Return ``outcome`` and ``reason`` of the ``finished`` event.

    If the deadline passes after the last step, the run has succeeded.

    Args:
        outcome: How the controller ended.
        overdue: The deadline passed before any stop of the user's.
        by_itself: The ranks stopped although nobody asked them to.
        kept: What the last save did with the newest state of a run that failed.
    """
    if outcome.failed is not None:
        message = outcome.message or ""
        return "failed", {
            "code": outcome.failed.value,
            "message": f"{message}; {kept}" if kept else message,
        }
    if outcome.stopped is None:
        return "succeeded", None
    if overdue:
        message = (
            f"recovery.deadline_s passed at step {outcome.last_step}; the last checkpoint is kept"
        )
        return "failed", {"code": ReasonCode.DEADLINE_EXCEEDED.value, "message": message}
    if by_itself:
        message = outcome.message or (
            f"paused at step {outcome.last_step} because saves fail (checkpoint.on_failed_saves "
            "is pause); "
            "repair the storage, then resume the run: it continues from the state that its nodes "
            "keep, or from its newest checkpoint"
        )
        return "stopped", {"code": ReasonCode.STORAGE_UNAVAILABLE.value, "message": message}
    code = (
        ReasonCode.CANCELLED_BY_USER if outcome.stopped == "cancel" else ReasonCode.PAUSED_BY_USER
    )
    return "stopped", {"code": code.value, "message": f"stopped by request: {outcome.stopped}"}


# ---------------------------------------------------------------- failure event

# The failure event: what happened, what follows, and what it is charged to.


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
    smaller = decision.micro_batch_size
    return Failure(
        at=datetime.fromtimestamp(evidence.noticed_at, UTC),
        attempt=evidence.attempt,
        verdict=judgement.verdict,
        first_rank=judgement.first_rank,
        node_id=judgement.node_id,
        step=judgement.step,
        exception=judgement.exception,
        evidence=judgement.detail | ({MICRO_BATCH_SIZE: smaller} if smaller is not None else {}),
        action=decision.action,
        budget=decision.budget,
        steps_lost=None,
        detect_s=detect_s,
        recovery_s=None,
        world_size_before=world_size or None,
        world_size_after=None,
    )
