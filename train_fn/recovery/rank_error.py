"""Carry a rank's error from the process that raised it to the verdict.

``describe_error`` turns the exception into a RankError, with its kind. StepFailed carries that out
of the training function; it survives pickling, and needs no module that the other side lacks.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import Any

from everstep.spec.plain_text import written_out
from everstep.wire import ErrorKind
from train_fn import clock as head_clock
from train_fn.errors import TrainError
from train_fn.recovery.error_kinds import kind_of
from train_fn.recovery.error_text import (
    message_of,
    plain_message,
    user_place,
    with_full_disk,
    with_place,
)

TRACEBACK_CHARS = 20_000
"""Longest traceback that travels; the middle of a longer one is cut out."""


@dataclass(frozen=True)
class RankError:
    """Why one rank stopped, as that rank saw it. ``at`` is unix seconds; ``step`` counts steps
    done."""

    rank: int
    kind: ErrorKind
    type: str
    message: str
    traceback: str
    step: int | None
    phase: str | None
    at: float
    snapshot_step: int | None = None
    """Step of the snapshot that the rank left on its node, if any."""
    stays_at: int | None = None
    """Step of the state that the rank keeps in its process, for the next attempt there, if any."""
    memory: str | None = None
    """Summary of its GPU's memory, if that ran out."""
    device: dict[str, Any] | None = None
    """What its node says of its GPU, after an error of the device (``node/device_evidence.py``)."""
    unheard: tuple[str, ...] = ()
    """Addresses of hosts from which nothing was heard although the rank waited for them."""
    place: str | None = None
    """Innermost line of uploaded code, ``task.py, line 12, in loss``; None if the traceback has
    none."""

    @property
    def collateral(self) -> bool:
        """Return whether the error only follows from the failure of another rank."""
        return self.kind is ErrorKind.COLLECTIVE

    @property
    def signature(self) -> str:
        """Return a text that is equal for two occurrences of one bug: type, message without numbers
        and addresses, and innermost frame."""
        message = re.sub(r"0x[0-9a-fA-F]+|\d+(\.\d+)?", "#", self.message)
        frames = re.findall(r'File "([^"]+)", line (\d+)', self.traceback)
        where = ":".join(frames[-1]) if frames else ""
        return f"{self.type}|{message}|{where}"

    @property
    def summary(self) -> str:
        """Return type and message."""
        return f"{self.type}: {self.message}" if self.message else self.type


class StepFailed(Exception):
    """Replaces the exception that ended a rank's attempt, once the rank has left its peers.

    It holds text instead of a traceback: the frames would keep the broken process group alive, and
    with it every peer that waits in a collective.
    """

    def __init__(self, error: RankError, snapshot_problem: str | None = None) -> None:
        super().__init__(f"rank {error.rank} stopped at step {error.step}: {error.summary}")
        self.error = error
        self.snapshot_problem = snapshot_problem
        """Why the rank left no snapshot on its node; None if it did."""

    def __reduce__(self) -> tuple[Any, ...]:
        return StepFailed, (self.error, self.snapshot_problem)


def describe_error(exc: BaseException, rank: int) -> RankError:
    """Return the rank's error for an exception, classified. A StepFailed keeps the error it
    carries."""
    if isinstance(exc, StepFailed):
        return exc.error
    trace = "".join(traceback.format_exception(exc))
    place = user_place(trace)
    kind = kind_of(exc)
    message = plain_message(message_of(exc))[:1600]
    if kind is ErrorKind.USER:
        message = with_full_disk(message, exc)[:1800]
    step = getattr(exc, "step", None) if isinstance(exc, TrainError) else None
    return RankError(
        rank=rank,
        kind=kind,
        type=type(exc).__name__,
        message=written_out(with_place(message, place and place.partition(", in ")[0])[:2000]),
        traceback=written_out(_shorten(trace)),
        step=step,
        phase=None,
        at=head_clock.now(),
        place=None if place is None else written_out(place),
    )


def _shorten(text: str) -> str:
    if len(text) <= TRACEBACK_CHARS:
        return text
    half = TRACEBACK_CHARS // 2
    return f"{text[:half]}\n… {len(text) - TRACEBACK_CHARS} characters left out …\n{text[-half:]}"
