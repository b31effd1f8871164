"""How a run is brought to its end: by its user, by its deadline, by a verdict, or by its last
step."""

from __future__ import annotations

from everstep.wire import ReasonCode
from storage.run_control import Stop
from train_fn.recovery.launch import Outcome


class Stopping:
    """What the ranks are told to do: the user's stop or the deadline's, whichever came first."""

    def __init__(self, deadline_at: float | None) -> None:
        """``deadline_at`` in unix seconds; None for a run without a deadline, or one whose steps
        are all done."""
        self._deadline_at = deadline_at
        self.asked: Stop | None = None
        """What the user asked for."""
        self.overdue = False
        """Whether the deadline came before any stop of the user's."""

    def decide(self, asked: Stop | None, now: float) -> Stop | None:
        """What the ranks are to be told now.

        Args:
            asked: what the user asked for by now, as far as the run directory could be read.
            now: unix seconds.
        """
        if not self.overdue:
            self.asked = asked or self.asked
            self.overdue = (
                self.asked is None and self._deadline_at is not None and now >= self._deadline_at
            )
        return "cancel" if self.overdue else self.asked


def ending(
    outcome: Outcome, *, overdue: bool, by_itself: bool = False, kept: str | None = None
) -> tuple[str, dict[str, str] | None]:
    """``outcome`` and ``reason`` of the ``finished`` event; ``by_itself`` where the ranks stopped
    although nobody asked.

    Ranks that had done their last step when they heard of the deadline did not stop: such a run has
    succeeded. ``kept`` says what the last save made of a failed run's newest state.
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
            "mend the storage, then resume the run: it goes on from the state that its nodes "
            "keep, or from its newest checkpoint"
        )
        return "stopped", {"code": ReasonCode.STORAGE_UNAVAILABLE.value, "message": message}
    code = (
        ReasonCode.CANCELLED_BY_USER if outcome.stopped == "cancel" else ReasonCode.PAUSED_BY_USER
    )
    return "stopped", {"code": code.value, "message": f"stopped as asked: {outcome.stopped}"}
