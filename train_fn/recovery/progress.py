"""Follow an attempt's progress by the events of its ranks: its phase, its step, and when it last
advanced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from everstep.wire.events import EventKind

_STEPS_KEPT = 512
_BESIDE_TRAINING = frozenset(
    {
        EventKind.GPU_USE,
        EventKind.RANK_USE,
        EventKind.STACKS,
        EventKind.STACKS_ORDERED,
        EventKind.PROFILE_ORDERED,
        EventKind.PROFILE_DONE,
        EventKind.PROFILE_FAILED,
    }
)
"""Sent by threads that keep running while training hangs, so they are no sign of progress."""

_MOVES = frozenset(
    {
        EventKind.ATTEMPT_STARTED,
        EventKind.RESTORED,
        EventKind.TRAINING_STARTED,
        EventKind.EPOCH_COMPLETED,
        EventKind.EVALUATED,
    }
)


def moved_at(kind: EventKind, at: float, data: dict[str, Any]) -> float | None:
    """Return when training advanced, in unix seconds, according to one event; None if the event
    does not say.

    A step counts when it ended, not when it was reported. Events of threads beside training do not
    count.
    """
    if kind is EventKind.METRICS:
        return max((float(point["at"]) for point in data["points"]), default=None)
    return at if kind in _MOVES else None


class Phase(StrEnum):
    """What an attempt is doing. Each phase has its own limit for time without progress."""

    START = "start"
    """From the start of the group until training is set up."""
    FIRST_STEP = "first_step"
    """The first step of an attempt: it compiles, warms up and allocates."""
    STEP = "step"
    EVALUATION = "evaluation"
    """Between two epochs: the evaluation, and the task's ``on_epoch_end``."""
    FINISH = "finish"
    """After the last step: evaluation and the final checkpoint."""


@dataclass(frozen=True)
class Progress:
    """The progress of the newest attempt."""

    attempt: int = 0
    phase: Phase = Phase.START
    num_signs: int = 0
    """Events of its ranks so far that show progress."""
    last_step: int | None = None
    """Most steps done, as far as any event of the submission says."""
    told_step: int | None = None
    """Newest step up to which the journals have the metrics of all; None if none has any."""
    step_p99_s: float | None = None
    """99th percentile of recent step times in seconds; None for fewer than 20 steps."""
    quiet_s: float = 0.0
    """Seconds since the last such event arrived."""
    moved_at: float | None = None
    """When it last advanced, in unix seconds, mostly its newest committed step; None before it has
    begun."""
    step: int = 0
    """Steps that the newest attempt has done, with those that it began with."""
    total_steps: int | None = None
    """Steps of the whole run, as a rank has last reported them; None if none has."""
    is_written: bool = True
    """Whether the journal could write what its ranks told last. If not, what they do is unknown."""


class ProgressTracker:
    """Takes a submission's events in journal order and keeps the progress of its newest attempt."""

    def __init__(self, told_step: int | None = None) -> None:
        """Begin with what earlier submissions have told: metrics up to ``told_step``."""
        self._told_step = told_step
        self._attempt = 0
        self._phase = Phase.START
        self._num_signs = 0
        self._has_stepped = False
        """Whether the attempt has done a step."""
        self._step = 0
        """Its current step; an earlier attempt may have been further."""
        self._last_step: int | None = None
        self._total_steps: int | None = None
        self._reported_total: int | None = None
        """The newest total of any attempt. A user's function begins each without one."""
        self._step_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._sign_at = time.monotonic()
        self._moved_at: float | None = None
        self._unwritten: set[str] = set()
        """Sources whose last signs of progress could not be written."""

    def note_unwritten(self, source: str, events: Iterable[tuple[EventKind, int]]) -> None:
        """Record that events of a source, each a kind and an attempt, could not be written."""
        if any(
            attempt == self._attempt and kind not in _BESIDE_TRAINING for kind, attempt in events
        ):
            self._unwritten.add(source)

    def note_written(self, source: str) -> None:
        """Record that all events which a source has sent are written."""
        self._unwritten.discard(source)

    def note(self, kind: EventKind, attempt: int, data: dict[str, Any], at: float = 0.0) -> None:
        """Record one event; ``at`` is its time in unix seconds."""
        self._note_steps(kind, data)
        if kind is EventKind.ATTEMPT_STARTED:
            if attempt > self._attempt:
                self._attempt, self._phase, self._num_signs = attempt, Phase.START, 0
                self._sign_at, self._moved_at = time.monotonic(), at
                self._unwritten.clear()
            return
        if attempt != self._attempt:
            return
        moved = moved_at(kind, at, data)
        if moved is not None:
            self._moved_at = max(self._moved_at or moved, moved)
        if kind in _BESIDE_TRAINING:
            return
        self._num_signs += 1
        self._sign_at = time.monotonic()
        if kind is EventKind.RESTORED and isinstance(data.get("step"), int):
            self._step = data["step"]
        elif kind is EventKind.TRAINING_STARTED:
            self._total_steps = data.get("total_steps")
            if self._total_steps is not None:
                self._reported_total = self._total_steps
            self._has_stepped = False
            self._phase = Phase.EVALUATION if data.get("rests") else self._after_step()
        elif kind is EventKind.METRICS:
            self._has_stepped = True
            self._step = max([self._step, *(point["step"] for point in data["points"])])
            self._phase = self._after_step()
        elif (
            self._phase is not Phase.START
            and kind is EventKind.EPOCH_COMPLETED
            and data.get("rests", True)
        ):
            self._phase = Phase.EVALUATION
        elif self._phase is not Phase.START and (
            kind is EventKind.EPOCH_HOOK_DONE
            or (kind is EventKind.EVALUATED and not data.get("rests", False))
        ):
            self._phase = self._after_step()

    def progress(self) -> Progress:
        """Return the progress as of the last event."""
        p99 = (
            sorted(self._step_s)[int(len(self._step_s) * 0.99)] if len(self._step_s) >= 20 else None
        )
        quiet_s = time.monotonic() - self._sign_at
        return Progress(
            self._attempt,
            self._phase,
            self._num_signs,
            self._last_step,
            self._told_step,
            p99,
            quiet_s,
            self._moved_at,
            self._step,
            self._reported_total,
            not self._unwritten,
        )

    def _after_step(self) -> Phase:
        if self._total_steps is not None and self._step >= self._total_steps:
            return Phase.FINISH
        return Phase.STEP if self._has_stepped else Phase.FIRST_STEP

    def _note_steps(self, kind: EventKind, data: dict[str, Any]) -> None:
        if kind is EventKind.METRICS:
            for point in data["points"]:
                self._last_step = max(self._last_step or 0, point["step"])
                self._told_step = max(self._told_step or 0, point["step"])
                step_s = point["values"].get("step_s")
                if step_s is not None:
                    self._step_s.append(step_s)
        elif kind in {
            EventKind.RESTORED,
            EventKind.CHECKPOINT_COMMITTED,
            EventKind.EVALUATED,
        } and isinstance(data.get("step"), int):
            self._last_step = max(self._last_step or 0, data["step"])
        if kind is EventKind.RESTORED and isinstance(data.get("step"), int):
            # Steps beyond it are made again.
            self._told_step = min(self._told_step or 0, data["step"])
