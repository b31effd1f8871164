"""A user's own training loop in this process: its place in the run, what protects it, and how it
ends.

Ray's layer calls the user's function and knows the place; `protect` runs inside that function and
looks it up here. How the loop ended is kept here, too: the user's code may catch any exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from storage.run_control import Stop
from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.recovery.evidence import RankError

EXIT_STOPPED = 75
"""Exit code of a process that was asked to stop and can continue."""


class StopAgreed(SystemExit):
    """Raised in a user's loop at the step at which the ranks agreed to stop, once its state is
    saved. The process then exits with EXIT_STOPPED, unless somebody called the loop."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(EXIT_STOPPED)
        self.stop: Stop = stop


class LoopProtection(Protocol):
    """What protects a user's loop: the object of ``es.protect``."""

    @property
    def step_number(self) -> int:
        """Return the steps done."""

    @property
    def is_open(self) -> bool:
        """Return whether the loop has begun, and has not ended in any way."""

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
    protection: LoopProtection | None = None
    """None if it does not call ``es.protect``."""
    has_begun: bool = False
    """Whether it was reported where the function continues without a protected state."""
    stop: Stop | None = None
    """The stop that the ranks agreed on. What is needed to go on is saved."""

    def failure(self, error: BaseException | None) -> BaseException | Left | None:
        """Return why the function failed, or None if it was stopped or has finished.

        Once the ranks have agreed to stop, nothing that the function does makes it fail or finish.
        Nor does it undo an error of its protected loop, whose peers are gone by then.

        Args:
            error: what the function raised; None if it returned.
        """
        if self.stop is not None:
            return None
        protection = self.protection
        if protection is not None and protection.left is not None:
            return protection.left
        if error is None and protection is not None and protection.is_open:
            return BadTask(
                f"the code returned while its protected loop is at step {protection.step_number} "
                "and has not ended; leave `with state:` before it returns, and join the thread "
                "that trains"
            )
        return error


present: OwnLoop | None = None
"""None outside of a user's function that a service runs."""
