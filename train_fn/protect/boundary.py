"""Where a step ends and the next one begins.

A loop goes on after ``state.step()``: an epoch ends, a scheduler steps, an average follows, the
model is evaluated. What it changes there belongs to the state of that step. It is whole when the
next step begins: when es.loader hands out a batch, or the model is called to train.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from train_fn.errors import BadTask
from train_fn.protect.changes import FROZEN, OPTIONS
from train_fn.protect.loop_state import LoopState
from train_fn.state.contents import few
from train_fn.step.peers import Peers
from train_fn.step.plain_attributes import PlainAttributes

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


# ---------------------------------------------------------------- order

# Mistakes in the order of a loop, found in the first steps of an attempt.
#
# What a loop changes after ``state.step()`` would be done twice, or not at all, by a restart. What
# differs between ranks could not be trusted by one. Both are found by digests of two steps, which
# takes a few milliseconds once.

_STEPS = 2


class OrderWatch:
    """Compares the state of a commit with that before the next optimizer step, and between
    ranks."""

    def __init__(self, state: LoopState, peers: Peers) -> None:
        self._state, self._peers = state, peers
        self._left = _STEPS
        self._committed: dict[str, str] | None = None

    def committed(self) -> None:
        """Note the state of a commit, and compare it between ranks at the first one. A collective.

        Raises BadTask if it differs.
        """
        if not self._left:
            return
        self._committed = self._state.digests()
        if self._left == _STEPS and not self._peers.alone:
            mine = {**self._committed, **self._state.digest_of_rest()}
            self._compare(self._peers.gather(mine))
        self._left -= 1

    def renew(self) -> None:
        """Note the state again: what the loop did after the commit belongs to it."""
        if self._committed is not None:
            self._committed = self._state.digests()

    def about_to_change(self) -> None:
        """Compare the present state with that of the commit. Raises BadTask if the loop changed it
        since."""
        if self._committed is None:
            return
        before, self._committed = self._committed, None
        now = self._state.digests()
        changed = [
            name for name in before if now[name] != before[name] and not self._state.is_copied(name)
        ]
        if changed:
            raise BadTask(
                f"the loop changed {', '.join(changed)} after state.step() and before the next "
                "optimizer step, so a restart would do it twice or not at all. Move the change "
                "before state.step()"
            )

    def _compare(self, of_ranks: list[dict[str, str]]) -> None:
        for rank, digests in enumerate(of_ranks):
            differing = [
                name
                for name in digests
                if not self._state.is_of_rank(name) and digests[name] != of_ranks[0].get(name)
            ]
            if differing:
                raise BadTask(
                    f"{', '.join(differing)} differ between rank {rank} and rank 0 after "
                    "state.step(). es.protect keeps one state for all ranks: wrap the model by "
                    "DistributedDataParallel (or, if it is sharded, let buffers follow from all "
                    "ranks, as SyncBatchNorm does), and leave what differs by rank out of extra"
                )


# ---------------------------------------------------------------- attributes

# Attributes of a loop's models and optimizers that no state holds: counters, slow weights, and
# random generators of their own.

_SET_BY_ACCELERATE = ("_is_accelerate_prepared",)
"""Attributes that Accelerate sets on any model, also in the Trainer of Hugging Face."""


class AttributeWatch:
    """Warn of plain attributes that the first step of an attempt changes. A restart would begin
    with their first values.

    Args:
        models: by the prefix of their names.
        optimizers: by name. What their ``state_dict`` has under the name of an attribute is kept.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    ) -> None:
        owners: dict[str, object] = {
            f"{prefix}{name}".strip("."): module
            for prefix, model in models.items()
            for name, module in model.named_modules()
            if not _is_of_library(type(module))
        }
        self._of_libraries = {
            f"{name}.{key}".strip(".")
            for name, owner in owners.items()
            for key in (*_names_of_libraries(type(owner)), *_SET_BY_ACCELERATE)
        }
        for name, optimizer in (optimizers or {}).items():
            if not type(optimizer).__module__.startswith("torch."):
                owner = f"optimizer.{name}".strip(".")
                owners[owner] = optimizer
                self._of_libraries |= {f"{owner}.{key}" for key in optimizer.state_dict()}
        self._before: PlainAttributes | None = PlainAttributes(owners)

    def committed(self) -> None:
        """Compare the attributes after the first commit."""
        before, self._before = self._before, None
        if before is None:
            return
        changed = [name for name in before.changed() if not self._is_of_library(name)]
        if changed:
            logger.warning(
                "the first step changes %s, which no checkpoint holds: a restart begins with the "
                "first values. Register tensors as buffers of the model, take the count of steps "
                "from state.step_number, draw from the global generators, or pass an object with "
                "state_dict() and load_state_dict() that keeps the rest as es.protect(extra=…)",
                few(changed),
            )

    def _is_of_library(self, name: str) -> bool:
        return any(name == own or name.startswith(f"{own}.") for own in self._of_libraries)


def _names_of_libraries(kind: type) -> frozenset[str]:
    """Return the attributes that Lightning sets on a module of its own kind, as its trainer. They
    are Lightning's to keep."""
    return frozenset(
        name
        for base in kind.__mro__
        if base.__name__ == "LightningModule" and _is_of_library(base)
        for name in vars(base())
    )


def _is_of_library(kind: type) -> bool:
    """Return whether a class is of an installed package other than torch itself."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return "site-packages" in file and not kind.__module__.startswith("torch.")
