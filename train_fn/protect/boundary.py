"""Where a step of a user's loop ends and the next one begins.

A loop goes on after ``state.step()``: an epoch ends, a scheduler steps, an average follows, the
model is evaluated. What it changes there belongs to the state of that step. It is whole when the
next step begins: when es.loader hands out a batch, or the model is called in training mode. What
follows an epoch may change nothing of the state, such as an evaluation by one rank: then the step
is whole when all ranks have begun the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from train_fn.errors import BadTask, few
from train_fn.protect.changes import FROZEN, OPTIONS
from train_fn.protect.loop_state import LoopState

_BUFFERS = "buffers or untrained weights"


class CopiesAsNothing:
    """A hook on an object of the user's. A copy of that object, also one in a file, has a hook that
    does nothing, and needs no Everstep to be read."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Boundary:
    """Follow the loop of one rank from each commit to the beginning of the next step."""

    def __init__(self, state: LoopState, renew: Callable[[], None]) -> None:
        """``renew`` copies the newest commit again, if copies of whole states are kept."""
        self._state, self._renew = state, renew
        self.is_open = True
        """Whether the next step has not begun."""
        self.sees_steps = False
        """Whether something says when a step begins. If nothing does, it is the commit."""
        self._is_first = True
        self.ends_epoch = False
        """Whether the newest commit ended an epoch. A loader moves on before the next step."""
        self._changed: set[str] = set()
        """What the loop was seen to change after a commit within an epoch."""
        self._num_passes = 0
        """Passes in training mode since the commit that nothing is learned from, as under no_grad;
        -1 once the step has made one that it learns from."""
        self._usual_passes: int | None = None
        """Those that the attempt's first step began with."""
        self._more_passes = 0
        """Passes that came before the newest step beside those."""
        self._hooks: list[Any] = []

    def watch(self, models: Mapping[torch.nn.Module, bool], begin: Callable[[], None]) -> None:
        """Call ``begin`` when a pass in training mode begins the next step. Of each model is said
        whether it is trained."""

        def before_call(is_trained: bool, model: torch.nn.Module, _: Any) -> None:
            # While torch compiles, as if nothing said where a step begins.
            if torch.compiler.is_compiling() or not model.training:
                return
            if self.begins(learns=is_trained and torch.is_grad_enabled()):
                begin()

        self._hooks = [
            # Before FSDP's own hook, which puts whole weights in the place of shards.
            model.register_forward_pre_hook(
                CopiesAsNothing(partial(before_call, is_trained)), prepend=True
            )
            for model, is_trained in models.items()
            if getattr(model, "_compiled_call_impl", None) is None
        ]

    def unwatch(self) -> None:
        """Let passes say nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def commit(self) -> None:
        """Begin what follows a commit."""
        if self.is_open:
            self.sees_steps = False  # the model was called where no hook sees it
        self.is_open, self._is_first, self._num_passes = True, False, 0
        self.ends_epoch = self._state.ends_epoch

    def begins(self, *, learns: bool) -> bool:
        """Return whether the next step begins with this pass in training mode.

        It begins with the first pass that the loop learns from, or with a pass before that one. But
        a pass that is not learned from may belong to the step before, as for statistics at the end
        of an epoch. The attempt's first step shows how the loop does it.
        """
        if self._num_passes < 0:
            return False
        if not learns:
            self._num_passes += 1
            return self.is_open and (self._is_first or bool(self._usual_passes))
        if self._usual_passes is None:
            self._usual_passes = self._num_passes
        self._more_passes = self._usual_passes and max(0, self._num_passes - self._usual_passes)
        self.sees_steps, self._num_passes = True, -1
        return self.is_open

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
            if self.ends_epoch:
                self._state.epoch_began = self._state.step
            else:
                self._changed.update(changed)
        if changed:
            self._state.note_parts(of_step=False)
            self._renew()
        else:
            self._state.note_unseen()

    def require_unchanged(self) -> None:
        """Raise BadTask if the loop has changed a part, and nothing says to which step the change
        belongs: after a commit that no known beginning of a step follows, or by passes that may
        belong to either step."""
        if self._more_passes and self._state.moving.moves:
            raise BadTask(
                f"the loop made {self._more_passes} more passes in training mode under no_grad "
                f"after step {self._state.step} than its steps begin with, so to which step the "
                "buffers that they change belong is not known. Call model.eval() before an "
                "evaluation, or read the data by es.loader, which says where a step begins"
            )
        if not self.sees_steps and not self._is_first:
            weights = ["the trained weights"] if self._state.weights_have_changed() else []
            require_order([*self._state.changed_parts(self._state.parts.settled), *weights])

    def problem(self) -> str | None:
        """Return why the state of the newest commit must not be left; None if it may."""
        if not self.is_open or self._is_first:
            return None
        if self.ends_epoch:
            return (
                "the loop was interrupted at the end of an epoch, before all ranks began the next "
                "step: what it does there, as an evaluation, may not be done"
            )
        missing = {*self._state.changed(), *self._changed}
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


def require_order(changed: Collection[str]) -> None:
    """Raise BadTask for parts that changed where no step is known to begin."""
    if changed:
        raise BadTask(
            f"the loop changed {few(sorted(changed))} after state.step() and before the next "
            "optimizer step, so a restart would do it twice or not at all. Move the change before "
            "state.step(), or read the data by es.loader, which says where a step begins"
        )
