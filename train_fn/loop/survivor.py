"""What a process keeps of an attempt that broke, for the next attempt that it serves.

A rank that merely lost a peer keeps its model, optimizer and state where they are, on its device.
The slot (``process_slot``) is empty in a new process, so that its first attempt builds everything.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from storage.run_names import Origin
from train_fn.context import WorkerContext
from train_fn.errors import TrainError
from train_fn.loop.parts import Parts
from train_fn.snapshots import process_slot
from train_fn.snapshots.leaving import leave_snapshot
from train_fn.snapshots.state_file import state_digest
from train_fn.snapshots.store import Label
from train_fn.state.digest import tree_digest
from train_fn.state.tensor_tree import take_apart

logger = logging.getLogger(__name__)


_OF_ONE_RANK = frozenset({"tail", "parent", "contents"})
"""Entries of a state that may differ between ranks."""


class Kept(NamedTuple):
    """Describe a state that a process has kept."""

    label: Label
    details: str
    """Digest of what the label's digest leaves out: whether the state is evaluated, for example."""

    def is_equal_to(self, other: Kept) -> bool:
        """Return whether both are of equal states, whoever made them."""
        mine, theirs = self.label, other.label
        return (mine.step, mine.digest, self.details) == (theirs.step, theirs.digest, other.details)


@dataclass(frozen=True)
class Survivor:
    """A state of whole steps, and everything that it was trained with."""

    parts: Parts
    ctx: WorkerContext
    """Of the attempt that made the state."""
    described: Future[Kept]
    """What an election has to know of the state."""

    @property
    def step(self) -> int:
        return self.parts.state.step

    @property
    def origin(self) -> Origin:
        return self.ctx.submission, self.ctx.attempt

    def serves(self, ctx: WorkerContext) -> bool:
        """Return whether an attempt trains the same run in the same way."""
        mine = self.ctx
        return (mine.run_dir.uri, mine.submission, mine.spec, mine.device) == (
            ctx.run_dir.uri,
            ctx.submission,
            ctx.spec,
            ctx.device,
        )

    def leave(self) -> str | None:
        """Leave the state as a snapshot on this node. Return None, or the problem."""
        wait([self.described])  # one thread at a time reads the state
        try:
            state = self.parts.state.state_dict()
            self.parts.state.require_sound(state)
            return leave_snapshot(self.ctx, state)
        except (TrainError, RuntimeError) as exc:  # a device may not be readable any more
            logger.warning("the kept state of step %d cannot be left: %s", self.step, exc)
            return f"the kept state of step {self.step} cannot be left: {exc}"


def keep(parts: Parts, ctx: WorkerContext, state: dict[str, Any]) -> None:
    """Keep a state in this process, and everything that it was trained with.

    Args:
        ctx: of the attempt that made the state.
        state: its ``state_dict``. It is digested in the background, while the next group is formed.
    """
    survivor = Survivor(parts, ctx, Future())
    label = Label(*survivor.origin, survivor.step, ctx.world_rank, None, None)
    threading.Thread(
        target=_describe, args=(survivor.described, label, state), name="digest-state", daemon=True
    ).start()
    process_slot.keep(survivor)


def _describe(described: Future[Kept], label: Label, state: dict[str, Any]) -> None:
    try:
        rest = {name: value for name, value in state.items() if name not in _OF_ONE_RANK}
        details = tree_digest(take_apart(rest, []))
        described.set_result(Kept(replace(label, digest=state_digest(state)), details))
    except BaseException as exc:  # a device that cannot be read; it is raised by who asks
        described.set_exception(exc)


def take(ctx: WorkerContext) -> Survivor | None:
    """Return what an earlier attempt of this process has kept for such an attempt, and empty the
    slot. What it has kept for any other is dropped."""
    survivor = process_slot.take()
    if not isinstance(survivor, Survivor) or not ctx.in_process or not survivor.serves(ctx):
        return None
    survivor.parts.origin = survivor.origin
    return survivor
