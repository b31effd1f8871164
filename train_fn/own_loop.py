"""A user's own training loop in this process: its place in the run, and what protects it.

Ray's layer calls the user's function and knows the place; `protect` runs inside that function and
looks it up here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from storage.run_control import Stop
from train_fn.context import WorkerContext
from train_fn.recovery.rank_error import RankError

EXIT_STOPPED = 75
"""Exit code of a process that was asked to stop and can continue."""


class StopAgreed(SystemExit):
    """Raised in a user's loop at the step at which the ranks agreed to stop, once its state is
    saved. The process then exits with EXIT_STOPPED, unless somebody called the loop."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(EXIT_STOPPED)
        self.stop: Stop = stop


class Protection(Protocol):
    """What protects a user's loop: the object of ``es.protect``."""

    @property
    def step_number(self) -> int:
        """Return the steps done."""

    @property
    def left(self) -> Left | None:
        """Return how the loop was left; None unless an error ended it."""


@dataclass(frozen=True)
class Left:
    """How a protected loop was left by an error."""

    error: RankError
    problem: str | None
    """Why the state is not on the node; None if it is."""


@dataclass
class OwnLoop:
    """The user's function that this process runs."""

    ctx: WorkerContext
    protection: Protection | None = None
    """None if it does not call ``es.protect``."""
    has_begun: bool = False
    """Whether it was reported where the function continues without a protected state."""


present: OwnLoop | None = None
"""None outside of a user's function that a service runs."""
