"""The earlier failures of a run: which budget each is charged to, and how many in a row came
without progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.wire import Verdict
from train_fn.recovery.links import Pairs
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

    def is_like(self, judgement: Judgement) -> bool:
        """Return whether the same thing failed at the same step as now."""
        return (self.verdict, self.step, self.signature) == (
            judgement.verdict,
            judgement.step,
            judgement.signature,
        )


def budget_of(verdict: Verdict) -> str:
    """Return the budget that a failure with this verdict is charged to."""
    return BUDGET_OF.get(verdict, "system_failures")


def made_progress(failure: PastFailure | Judgement) -> bool:
    """Return whether a script that reports no steps ran for long enough to have moved on."""
    return failure.worked_s is not None and failure.worked_s >= SCRIPT_PROGRESS_S


def failures_in_a_row(judgement: Judgement, past: Sequence[PastFailure]) -> int:
    """Return how many failures of this budget came without progress: this one, and those before it
    down to the last one at a smaller step.

    A failure whose step is unknown counts at the step of the failure before it: as step 0 it would
    look like a step back. A script that reports no steps moves on by running for long.
    """
    count = 1
    if made_progress(judgement):
        return count
    steps: list[int] = []
    for known in (*(failure.step for failure in past), judgement.step):
        steps.append(known if known is not None else steps[-1] if steps else 0)
    for failure, step in zip(reversed(past), reversed(steps[:-1]), strict=True):
        if budget_of(failure.verdict) != budget_of(judgement.verdict):
            continue
        if steps[-1] > step:
            break
        count += 1
        if made_progress(failure):
            break
    return count
