"""Mistakes in the order of a loop, found in the first steps of an attempt.

What a loop changes after ``state.step()`` would be done twice, or not at all, by a restart. What
differs between ranks could not be trusted by one. Both are found by digests of two steps, which
takes a few milliseconds once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

import torch
from torch import nn

from train_fn.errors import BadTask
from train_fn.protect.loop_state import LoopState
from train_fn.state.contents import few
from train_fn.step.peers import Peers
from train_fn.step.plain_attributes import PlainAttributes

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
                if name not in self._state.parts.loaders and digests[name] != of_ranks[0].get(name)
            ]
            if differing:
                raise BadTask(
                    f"{', '.join(differing)} differ between rank {rank} and rank 0 after "
                    "state.step(). es.protect keeps one state for all ranks: wrap the model by "
                    "DistributedDataParallel, and leave what differs by rank out of extra"
                )


# ---------------------------------------------------------------- attributes

# Attributes of a loop's models and optimizers that no state holds: counters, slow weights, and
# random generators of their own.

_SET_BY_ACCELERATE = ("_is_accelerate_prepared",)
"""Attributes that Accelerate sets on any model, also in the Trainer of Hugging Face."""

logger = logging.getLogger(__name__)


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
