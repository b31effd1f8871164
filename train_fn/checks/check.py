"""What a check is, when it is made, and how a loop calls all of them by one line.

A check guards against one mistake in code of the user's: something that would train another model
on each rank, or that a restart would do twice or not at all. It compares, raises BadTask or
DataChanged or warns, and changes nothing.

Checks that look at what code has changed are classes, called before and after it. Those that look
at one thing are functions, marked by ``checked``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

_Checked = TypeVar("_Checked", bound=Callable[..., Any])


class Moment(StrEnum):
    """When checks are made, in the order of a run. The values are the words of docs/checks.md."""

    BUILT = "before training: task, data, model and optimizer are built"
    RESTORED = "before training: the ranks meet, and a state is restored"
    FIRST_PASS = "before training: a first batch is tried, and its results are dropped"
    TRIED = "before training: a validation batch is tried"
    LOSS = "in a step: training_step of the task, or a loop of one's own, computes gradients"
    STEP = "in a step: it is about to be committed, or was just committed"
    AFTER_STEP = "in a step: after_step of the task runs"
    EVALUATED = "between two steps: the model is evaluated"
    EPOCH_HOOK = "between two steps: on_epoch_end of the task runs"
    LEAVING = "at the end: before the final checkpoint"


class Check:
    """A guard against one mistake."""

    costs: ClassVar[Mapping[Moment, str]]
    """The moments at which the check is made, and what it costs there."""

    def before(self, moment: Moment) -> None:
        """Note what the code that runs now must not change."""

    def after(self, moment: Moment, source: str) -> None:
        """Raise BadTask or DataChanged if that code made the mistake, or warn of it.

        Args:
            source: name of the code, with its file and line.
        """


class Checks:
    """The checks of one rank in an attempt, in the order in which they are made."""

    def __init__(self, checks: Iterable[Check]) -> None:
        checks = list(checks)
        self._made_at = {
            moment: tuple(check for check in checks if moment in check.costs) for moment in Moment
        }

    def before(self, moment: Moment) -> None:
        """Let every check note what it compares later."""
        for check in self._made_at[moment]:
            check.before(moment)

    def at(self, moment: Moment, source: str = "") -> None:
        """Make the checks of a moment; ``source`` names the code that has run."""
        for check in self._made_at[moment]:
            check.after(moment, source)

    @contextmanager
    def around(self, moment: Moment, source: str) -> Iterator[None]:
        """Make the checks of a moment around the code inside, whose name is ``source``."""
        self.before(moment)
        yield
        self.at(moment, source)


def checked(*moments: Moment, cost: str) -> Callable[[_Checked], _Checked]:
    """Mark a function that is a check by itself, for docs/checks.md."""
    return lambda function: function
