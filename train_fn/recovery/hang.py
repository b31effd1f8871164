"""Detect that an attempt makes no progress, and which of its ranks the others are waiting for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from train_fn.recovery.progress import Phase, Progress
from train_fn.recovery.settings import RecoverySettings

_SILENCE_S = 3.0
"""If two polls are further apart than this, the journal was silent, not necessarily the ranks.
Longer if polls are rarer. A poll without a reply since the last one sees nothing."""

SILENT_S = 1.5
"""While a group shuts down, a rank that does not answer for this long is stopped or stuck outside
Python."""

ABORTING_SILENT_S = 10.0
"""The same while ranks abort their collectives: an abort may hold Python up."""

WAITING_FILES = (
    *("/torch/distributed/", "/torch/autograd/graph.py", "/train_fn/elastic/"),
    *("/ray/_private/", "/ray/train/", "/ray/util/"),
    *(
        "/train_fn/loop/own_step.py",
        "/train_fn/loop/replica.py",
        "/train_fn/loop/state_broadcast.py",
        "/train_fn/user_code/packages.py",
    ),
    *("/train_fn/protect/agreement.py", "/train_fn/protect/volatile.py"),
    "/train_fn/ray_train/user_script.py",
    *("/train_fn/step/carrier.py", "/train_fn/step/peers.py", "/train_fn/step/rank_mean.py"),
    *("/train_fn/step/step_values.py", "/train_fn/step/used_parameters.py"),
)
"""Parts of the paths of source files whose code waits for other ranks: collectives, a backward that
ends with one, a barrier of Ray Train."""

_TAKES_LONG = {
    Phase.START: "the set-up of an attempt",
    Phase.FIRST_STEP: "the first step",
    Phase.STEP: "a step",
    Phase.EVALUATION: "an evaluation, or on_epoch_end,",
    Phase.FINISH: "the last evaluation or checkpoint",
}


class HangWatch:
    """Detects that an attempt made no progress for longer than its phase allows.

    The caller passes the time, in monotonic seconds.
    """

    def __init__(self, settings: RecoverySettings, hang_timeout_s: float | None) -> None:
        self._settings = settings
        self._silence_s = max(_SILENCE_S, 2 * settings.quiet_poll_s)
        self._hang_timeout_s = hang_timeout_s
        self._seen: tuple[int, int] | None = None
        self._moved_at = 0.0
        self._looked_at = float("-inf")
        self.due_at = float("inf")
        """When the attempt is overdue if it makes no progress until then, in monotonic seconds."""

    def overdue_s(self, progress: Progress, now: float) -> float | None:
        """Return the seconds without progress if they exceed the limit, else None.

        Call it with every reply of the journal. While the journal cannot write what ranks tell, no
        time counts: they may train on, and no later attempt could begin.
        """
        seen = (progress.attempt, progress.num_signs)
        if now - self._looked_at > self._silence_s or not progress.is_written:
            self._seen, self._moved_at = seen, now
        elif seen != self._seen:
            self._seen, self._moved_at = seen, now - progress.quiet_s
        self._looked_at = now
        self.due_at = self._moved_at + self.limit_s(progress)
        return now - self._moved_at if now > self.due_at else None

    def quiet_s(self, now: float) -> float:
        """Return the seconds since the attempt last moved, as far as is known at ``now``."""
        return 0.0 if self._seen is None else now - self._moved_at

    def reason(self, progress: Progress, overdue_s: float) -> str:
        """Return why the ranks are taken for hung, and which setting of the spec allows more."""
        set_s = self._hang_timeout_s
        setting = "is not set" if set_s is None else f"is {set_s:g}"
        return (
            f"no sign of life for {overdue_s:.1f} s in phase {progress.phase}; the limit is "
            f"{self.limit_s(progress):g} s (recovery.hang_timeout_s {setting}). If "
            f"{_TAKES_LONG[progress.phase]} really takes this long, set recovery.hang_timeout_s "
            "to more"
        )

    def limit_s(self, progress: Progress) -> float:
        """Return how many seconds the current phase may take without progress."""
        settings = self._settings
        if progress.phase is Phase.STEP:
            if self._hang_timeout_s is not None:
                return self._hang_timeout_s
            return max(settings.hang_min_s, settings.hang_factor * (progress.step_p99_s or 0.0))
        allowed = {
            Phase.START: settings.hang_start_s,
            Phase.FIRST_STEP: settings.hang_first_step_s,
            Phase.EVALUATION: settings.hang_evaluation_s,
            Phase.FINISH: settings.hang_evaluation_s,
        }
        return max(allowed[progress.phase], self._hang_timeout_s or 0.0)


def find_stuck(stacks: Mapping[int, str | None]) -> list[int]:
    """Return the ranks that the others are waiting for.

    A rank is stuck if it does not answer, or if it runs code that waits for nobody. If all ranks
    wait for each other in collectives, the last one is given up to free the others, since rank 0
    reports.

    Args:
        stacks: Each rank's training stack, innermost frame last; None for one that did not answer.
    """
    silent = [rank for rank, stack in stacks.items() if stack is None]
    if silent:
        return silent
    busy = [
        rank for rank, stack in stacks.items() if stack is not None and not waits_for_others(stack)
    ]
    return busy or [max(stacks)]


def is_known_who_hangs(stacks: Mapping[int, str | None]) -> bool:
    """Return whether the stacks show who holds up the others: not where all wait for each other, as
    ranks on GPUs do whatever happens."""
    return any(stack is None or not waits_for_others(stack) for stack in stacks.values())


def find_silent(
    asked_at: Mapping[int, float],
    stacks: Mapping[int, str | None],
    waiting: Collection[int],
    now: float,
    silent_s: float = SILENT_S,
) -> list[int]:
    """Return the ranks to kill while a group shuts down: those that do not answer, if another rank
    that does is blocked in a collective.

    Without such a rank, killing would free nobody: a rank that is busy writing its state may be
    slow to answer.

    Args:
        asked_at: When each rank was last asked, in monotonic seconds.
        stacks: Stacks of ranks that answered and are still in their step.
        waiting: Ranks that have not ended.
        now: Monotonic seconds.
        silent_s: How long a rank may not answer.
    """
    silent = silent_ranks(asked_at, waiting, now, silent_s)
    if not silent:
        return []
    held_up = any(_cannot_leave(stacks.get(rank) or "") for rank in waiting if rank not in silent)
    return silent if held_up else []


def silent_ranks(
    asked_at: Mapping[int, float],
    waiting: Collection[int],
    now: float,
    silent_s: float = SILENT_S,
) -> list[int]:
    """Return the ranks in ``waiting`` that have not answered for ``silent_s``; the arguments are
    those of ``find_silent``."""
    return [rank for rank in sorted(waiting) if now - asked_at[rank] > silent_s]


def may_still_leave(stacks: Mapping[int, str | None], waiting: Collection[int]) -> bool:
    """Return whether one of the ranks in ``waiting`` runs code that waits for nobody, so that it
    will come to its next collective, leave there, and keep its state.

    Args:
        stacks: stacks of ranks that answered and are still in their step.
        waiting: ranks that have not ended, and answer.
    """
    return any((stack := stacks.get(rank)) and not _cannot_leave(stack) for rank in waiting)


def _cannot_leave(stack: str) -> bool:
    """Return whether a rank waits for others, or for its connections to them to close."""
    return waits_for_others(stack) or stack.rstrip().rpartition("File ")[2].partition("\n")[
        0
    ].endswith(", in leave")


def waits_for_others(stack: str) -> bool:
    """Return whether a training stack ends in code that waits for other ranks."""
    files = re.findall(r'File "([^"]+)", line \d+', stack)
    return bool(files) and any(part in files[-1] for part in WAITING_FILES)
