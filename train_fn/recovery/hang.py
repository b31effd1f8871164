"""When an attempt has stood still for too long, and which of its ranks is the one that the others
wait for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from train_fn.recovery.progress import Phase, Progress
from train_fn.recovery.settings import RecoverySettings

_SILENCE_S = 3.0
"""A gap between two looks after which the journal's silence, not the ranks', is what was seen;
longer where looks are rarer. A look sees nothing where no reply came since the last one."""

SILENT_S = 1.5
"""A rank that a settling group asks, and that says nothing for so long, is stopped or stuck outside
of Python."""

WAITING_FILES = (
    *("/torch/distributed/", "/torch/autograd/graph.py"),
    *("/ray/_private/", "/ray/train/", "/ray/util/"),
    *("/train_fn/loop/replica.py", "/train_fn/loop/restore.py", "/train_fn/user_code/packages.py"),
    *("/train_fn/step/buffers.py", "/train_fn/step/peers.py", "/train_fn/step/step_totals.py"),
)
"""Parts of the paths of source files whose code waits for other ranks: collectives, a backward that
ends with one, a barrier of Ray Train."""


class HangWatch:
    """Tells when nothing has moved for longer than the phase allows. Time is given in by the
    caller, in monotonic seconds."""

    def __init__(self, settings: RecoverySettings, hang_timeout_s: float | None) -> None:
        self._settings = settings
        self._silence_s = max(_SILENCE_S, 2 * settings.quiet_poll_s)
        self._hang_timeout_s = hang_timeout_s
        self._seen: tuple[int, int] | None = None
        self._moved_at = 0.0
        self._looked_at = float("-inf")
        self.due_at = float("inf")
        """When the attempt will be overdue if nothing moves until then; in monotonic seconds."""

    def overdue_s(self, progress: Progress, now: float) -> float | None:
        """Seconds without a sign of life, when too long; None while all is well. Call it with every
        reply of the journal."""
        seen = (progress.attempt, progress.num_signs)
        if now - self._looked_at > self._silence_s:
            self._seen, self._moved_at = seen, now
        elif seen != self._seen:
            self._seen, self._moved_at = seen, now - progress.quiet_s
        self._looked_at = now
        self.due_at = self._moved_at + self.limit_s(progress)
        return now - self._moved_at if now > self.due_at else None

    def limit_s(self, progress: Progress) -> float:
        """How long the present phase may take without a sign of life."""
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
    """Ranks that hold the others up, by each rank's training stack (innermost frame last); None for
    one that did not answer.

    Who does not answer, or is in code that waits for nobody, is stuck. Where all wait for each
    other in collectives, one of them is given up, so that the others are freed: the last, since
    rank 0 reports.
    """
    silent = [rank for rank, stack in stacks.items() if stack is None]
    if silent:
        return silent
    busy = [
        rank for rank, stack in stacks.items() if stack is not None and not waits_for_others(stack)
    ]
    return busy or [max(stacks)]


def find_silent(
    asked_at: Mapping[int, float],
    stacks: Mapping[int, str | None],
    waiting: Collection[int],
    now: float,
) -> list[int]:
    """Ranks to kill while a group settles: they say nothing, and another that does is held up
    inside a collective.

    Without such another nobody would be freed by it, and a rank that is busy writing its state may
    be slow to answer.

    Args:
        asked_at: when each rank was last asked, in monotonic seconds.
        stacks: of ranks that answered that they are still in their step, where.
        waiting: ranks that have not ended.
        now: monotonic seconds.
    """
    silent = silent_ranks(asked_at, waiting, now)
    if not silent:
        return []
    held_up = any(_cannot_leave(stacks.get(rank) or "") for rank in waiting if rank not in silent)
    return silent if held_up else []


def silent_ranks(asked_at: Mapping[int, float], waiting: Collection[int], now: float) -> list[int]:
    """Those in ``waiting`` that have said nothing for too long since they were asked, as
    ``find_silent`` has it."""
    return [rank for rank in sorted(waiting) if now - asked_at[rank] > SILENT_S]


def _cannot_leave(stack: str) -> bool:
    """Whether a rank waits for others, or for its connections to them to close."""
    return waits_for_others(stack) or stack.rstrip().rpartition("File ")[2].partition("\n")[
        0
    ].endswith(", in leave")


def waits_for_others(stack: str) -> bool:
    """Whether a training stack ends in code that waits for other ranks."""
    files = re.findall(r'File "([^"]+)", line \d+', stack)
    return bool(files) and any(part in files[-1] for part in WAITING_FILES)
