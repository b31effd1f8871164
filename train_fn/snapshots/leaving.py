"""Leave a state on this node, for the next attempt to continue from.

The ranks of a node take turns. While one writes, the others digest their own states. A rank that
finds its state there by then writes nothing. If the writer died, the next rank writes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from train_fn.context import WorkerContext
from train_fn.snapshots.state_file import state_digest
from train_fn.snapshots.store import Label, SnapshotStore, snapshot_store
from train_fn.state.tensor_tree import size_bytes

OVERHEAD_BYTES = 4 << 20
"""Room for everything but tensors."""
TURN_S = 2.0
"""How long a rank at least waits for the others of its node to leave their states,"""
_SLOWEST_BYTES_PER_S = 500e6
"""and how fast it expects that of memory."""
_TURN_POLL_S = 0.002

logger = logging.getLogger(__name__)


def leave_snapshot(ctx: WorkerContext, state: dict[str, Any]) -> str | None:
    """Leave ``state`` on this node in place of all older ones, or a label that says why not. Return
    None, or the problem.

    Ranks of one node take turns, and a rank that finds the same state there writes no other: one of
    each rank may not fit. Tensors may be on any device. Raises BadTask for a value that could not
    be loaded again, and RuntimeError if a device cannot be read.
    """
    own = _OwnState(ctx, state)
    with _in_turn(own.store, TURN_S + size_bytes(state) / _SLOWEST_BYTES_PER_S, own.compare):
        # by another rank, or published
        problem = None if own.is_there() else own.leave_if_it_fits()
    if problem is None:
        own.store.remove_older(own.label, keep=0)
    else:
        logger.warning("step %d is not left on this node: %s", state["step"], problem)
        with suppress(OSError):
            own.store.write_label(replace(own.label, problem=problem))
    return problem


def publish_snapshot(ctx: WorkerContext, state: dict[str, Any]) -> str | None:
    """Keep ``state`` on this node beside the newest one before it: while one is written, another is
    whole. Return None, or the problem."""
    return _OwnState(ctx, state).write_if_it_fits()


def shortage(store: SnapshotStore, state: dict[str, Any], freed_bytes: int = 0) -> str | None:
    """Return why ``state`` does not fit into the node's shared memory after ``freed_bytes`` more
    are free; None if it fits."""
    needed, free = size_bytes(state) + OVERHEAD_BYTES, max(0, store.free_bytes() + freed_bytes)
    if needed <= free:
        return None
    return f"a snapshot of {needed} bytes does not fit the {free} bytes of shared memory left"


class _OwnState:
    """The state of this rank, which is about to be written."""

    def __init__(self, ctx: WorkerContext, state: dict[str, Any]) -> None:
        self.store = snapshot_store(ctx)
        self.label = Label(
            ctx.submission,
            ctx.attempt,
            state["step"],
            ctx.world_rank,
            digest=None,
            problem=None,
            storage=ctx.run_dir.storage.uri,
        )
        self._state = state

    @cached_property
    def _digest(self) -> str:
        return state_digest(self._state)

    def compare(self) -> None:
        """Take the digest now, since another rank's will be there to compare with."""
        _ = self._digest

    def is_there(self) -> bool:
        """Whether a rank has left exactly this state."""
        moment = (self.label.origin, self.label.step)
        return any(
            label.problem is None
            and (label.origin, label.step) == moment
            and label.digest == self._digest
            for label in self.store.labels()
        )

    def leave_if_it_fits(self) -> str | None:
        """Write the state, and remove older ones first if only that makes room. Return None, or the
        problem."""
        problem = self.write_if_it_fits()
        if problem is None or shortage(self.store, self._state, self.store.size_bytes()):
            return problem
        self.store.remove_older(self.label, keep=0)
        return self.write_if_it_fits()

    def write_if_it_fits(self) -> str | None:
        """Make room, then write the state: a node never holds more than two states of a rank.
        Return None, or the problem."""
        self.store.remove_older(self.label, keep=1)
        problem = shortage(self.store, self._state)
        if problem is None:
            try:
                self.store.write(self.label, self._state)
            except OSError as exc:
                problem = f"the snapshot could not be written: {exc}"
        return problem


@contextmanager
def _in_turn(
    store: SnapshotStore, patience_s: float, meanwhile: Callable[[], None]
) -> Iterator[None]:
    """Let one rank of this node in at a time. A rank that has to wait calls ``meanwhile`` first.
    After ``patience_s`` it enters anyway: the other one may be stopped."""
    try:
        store.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(store.directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the write will report the problem
        yield
        return
    gives_up_at = time.monotonic() + patience_s
    try:
        if not _locked(held):
            meanwhile()
            while not _locked(held) and time.monotonic() < gives_up_at:
                time.sleep(_TURN_POLL_S)
        yield
    finally:
        os.close(held)


def _locked(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
