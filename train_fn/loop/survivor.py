"""What a process holds for the next attempt that it serves: what it keeps of an earlier one, or
what it has built ahead.

A rank that merely lost a peer keeps its model, optimizer and state where they are, on its device.
The slot (``process_slot``) is empty in other new processes, so that their first attempt builds
everything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from storage.run_names import Origin
from train_fn.context import WorkerContext
from train_fn.errors import AsksForPeers, BuiltByHalves, TrainError
from train_fn.loop.outliving import Beginning, outliving, take_inventory
from train_fn.loop.parts import Parts
from train_fn.loop.replica import build_replica
from train_fn.recovery.staying import why_not_to_stay
from train_fn.samples.stream_set import StreamSet
from train_fn.snapshots import process_slot
from train_fn.snapshots.leaving import leave_snapshot
from train_fn.snapshots.state_file import state_digest
from train_fn.snapshots.store import Label
from train_fn.state.digest import tree_digest
from train_fn.state.tensor_tree import take_apart
from train_fn.step.place_watch import asked_at, watching

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


@dataclass(frozen=True)
class Recruit:
    """Parts that nothing was trained with yet, for a rank that is to join."""

    parts: Parts
    ctx: WorkerContext
    """In which they were built. Its rank and size are not those that the rank gets."""
    step: None = None

    def leave(self) -> None:
        """Leave nothing, since there is no state."""


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


def build_ahead(ctx: WorkerContext) -> None:
    """Build what a rank trains while it has no peers yet, and keep it in this process.

    The first pass is tried alone, which puts everything back. In a new process it takes longest:
    kernels load, and memory is taken. Now nobody waits for it.

    Args:
        ctx: of a rank that is alone.

    Raises:
        AsksForPeers: the task asks for its rank or its peers. Others may have answered, and waited
            for it; what this process heard is wrong.
        BuiltByHalves: the task has left something in the process that the next attempt, which tries
            the first pass again, would not find in a fresh one.
    """
    began = Beginning()
    with _group_of_one(), watching():
        replica = build_replica(ctx)
        built = take_inventory(replica.parts)
        takes_peers = replica.exchanges_in_forward
        if not takes_peers and not isinstance(replica.train_set, StreamSet):
            replica.join(is_fresh=True)  # of a stream it would use up samples
            replica.let_go()
    if (place := asked_at()) is not None:
        raise AsksForPeers(place)
    if (reason := why_not_to_stay(outliving(began, replica.parts, built))) is not None:
        raise BuiltByHalves(reason)
    process_slot.keep(Recruit(replica.parts, ctx))


@contextmanager
def _group_of_one() -> Iterator[None]:
    """Have a process group inside, as every rank has. That there is one says nothing of peers."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def take(ctx: WorkerContext) -> Survivor | Recruit | None:
    """Return what this process holds for such an attempt, and empty the slot. What it holds for any
    other is dropped."""
    held = process_slot.take()
    if not isinstance(held, Survivor | Recruit) or not ctx.in_process:
        return None
    if _trained(held.ctx) != _trained(ctx):
        return None
    if isinstance(held, Survivor):
        held.parts.origin = held.origin
    return held


def _trained(ctx: WorkerContext) -> tuple[object, ...]:
    """Return what an attempt trains, and where."""
    return ctx.run_dir.uri, ctx.submission, ctx.spec, ctx.device
