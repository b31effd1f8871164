"""Where a step ends and the next one begins.

A loop goes on after ``state.step()``: an epoch ends, a scheduler steps, an average follows, the
model is evaluated. What it changes there belongs to the state of that step. It is whole when the
next step begins: when es.loader hands out a batch, or the model is called to train.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from train_fn.checks.order import OrderWatch
from train_fn.errors import BadTask
from train_fn.protect.changes import FROZEN, OPTIONS
from train_fn.protect.loop_state import LoopState
from train_fn.state.contents import few

logger = logging.getLogger(__name__)

_BUFFERS = "buffers or untrained weights"


class Boundary:
    """Follow the loop of one rank from each commit to the beginning of the next step."""

    def __init__(self, state: LoopState, watch: OrderWatch, renew: Callable[[], None]) -> None:
        """``renew`` copies the newest commit again, if copies of whole states are kept."""
        self._state, self._watch, self._renew = state, watch, renew
        self.is_open = True
        """Whether the next step has not begun."""
        self.sees_steps = False
        """Whether something says when a step begins. If nothing does, it is the commit."""
        self._is_first = True
        self._ends_epoch = False
        """Whether the newest commit ended an epoch. A loader moves on before the next step."""
        self._changed: dict[bool, set[str]] = {}
        """What the loop was seen to change after a commit; by whether it ended an epoch."""
        self._unsettled = state.parts.others.keys() - state.parts.loaders
        """Parts that were not seen to change within a step: they may do so after one."""

    def commit(self) -> None:
        """Begin what follows a commit. Call it before the parts are noted."""
        if self._unsettled:
            self._unsettled -= set(self._state.changed_parts(self._unsettled))
        self.is_open, self._is_first = True, False
        self._ends_epoch = self._state.ends_epoch

    def close(self) -> None:
        """Take what the loop has changed since the commit as part of it: the next step begins.

        Raises BadTask if it changed what it has just restored.
        """
        self.is_open = False
        if not self.sees_steps and not self._is_first:
            return  # the commit has just been made
        changed = self._state.changed()
        if self._is_first and self._state.step:
            require_restored(changed, self._state.step)
        elif not self._is_first:
            if self._ends_epoch:
                self._state.epoch_began = self._state.step
            self._changed.setdefault(self._ends_epoch, set()).update(changed)
        if changed:
            self._state.note_parts(of_step=False)
            self._watch.renew()
            self._renew()
        else:
            self._state.note_unseen()

    def require_unchanged(self) -> None:
        """Raise BadTask if the loop changed a part after its last commit, where nothing says when
        a step begins."""
        if not self.sees_steps and not self._is_first:
            settled = self._state.parts.settled
            require_order(self._state.changed_parts(settled))

    def problem(self) -> str | None:
        """Return why the state of the newest commit must not be left; None if it may."""
        if not self.is_open or self._is_first:
            return None
        return interrupted(self._state.changed(), self._changed, self._unsettled, self._ends_epoch)


def interrupted(
    changed: Collection[str],
    earlier: Mapping[bool, Collection[str]],
    unsettled: Collection[str],
    ends_epoch: bool,
) -> str | None:
    """Return why a commit is not whole when the loop is interrupted after it, before the next step
    begins; None if nothing is known to be missing.

    Args:
        changed: what the loop has changed since that commit.
        earlier: what it changed after earlier ones, by whether they ended an epoch.
        unsettled: parts that were never seen to change within a step.
        ends_epoch: whether this commit ended an epoch.
    """
    missing = {*changed, *earlier.get(ends_epoch, ())}
    if ends_epoch and ends_epoch not in earlier:
        missing.update(unsettled)  # what the end of an epoch does was not seen yet
    if not missing:
        return None
    return (
        "the loop was interrupted between state.step() and its next step, where it changes "
        f"{few(sorted(missing))}"
    )


def require_restored(changed: Collection[str], step: int) -> None:
    """Raise BadTask if a loop changed what it had just restored; an undisturbed one did not.
    Options of the optimizer, and which weights are trained, may be set anew."""
    options = {OPTIONS, FROZEN, _BUFFERS}
    if bad := sorted(set(changed) - options):
        raise BadTask(
            f"the loop changed {few(bad)} between `with state:` and its first step, after the "
            f"state of step {step} was restored: a restart would do it once more than an "
            "undisturbed run. Do it before `with state:`, after the steps of an epoch, or only "
            "if state.step_number is 0"
        )
    if changed:
        logger.warning(
            "the loop changed %s after the state of step %d was restored",
            few(sorted(changed)),
            step,
        )


def require_order(changed: Collection[str]) -> None:
    """Raise BadTask for parts that changed where no step is known to begin."""
    if changed:
        raise BadTask(
            f"the loop changed {few(sorted(changed))} after state.step() and before the next "
            "optimizer step, so a restart would do it twice or not at all. Move the change before "
            "state.step(), or read the data by es.loader, which says where a step begins"
        )
