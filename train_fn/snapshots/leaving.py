"""Leave a state on this node, for the next attempt to continue from: a small one as a snapshot, a
large one in the memory of the process that holds it, which lends it.

The ranks of a node take turns. While one writes, the others digest their own states. A rank that
finds its state there by then writes nothing. If the writer died, the next rank writes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from train_fn.context import WorkerContext
from train_fn.snapshots.state_file import state_digest
from train_fn.snapshots.store import Label, SnapshotStore, label_of, snapshot_store
from train_fn.state.tensor_tree import copy_to_cpu, size_bytes

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
    be loaded again, RuntimeError if a device cannot be read, and what ``SnapshotStore.write`` does.
    """
    own = _OwnState(ctx, state)
    with own.in_turn():
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
        self.label = label_of(ctx, state["step"])
        self._state = state

    @cached_property
    def digest(self) -> str:
        return state_digest(self._state)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let one rank of this node in at a time. A rank that has to wait takes its digest first,
        since another one's will be there to compare with. After a while it enters anyway: the other
        rank may be stopped."""
        directory = self.store.directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the write will report the problem
            yield
            return
        gives_up_at = time.monotonic() + TURN_S + size_bytes(self._state) / _SLOWEST_BYTES_PER_S
        try:
            if not _locked(held):
                _ = self.digest
                while not _locked(held) and time.monotonic() < gives_up_at:
                    time.sleep(_TURN_POLL_S)
            yield
        finally:
            os.close(held)

    def is_there(self) -> bool:
        """Whether a rank has left exactly this state."""
        moment = (self.label.origin, self.label.step)
        return any(
            label.problem is None
            and (label.origin, label.step) == moment
            and label.digest == self.digest
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
        problem = shortage(self.store, self._state, self.store.make_room(self.label))
        if problem is not None:
            self.store.drop_draft(self.label)
        else:
            try:
                self.store.write(self.label, self._state)
            except OSError as exc:
                problem = f"the snapshot could not be written: {exc}"
        return problem


def _locked(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ---------------------------------------------------------------- lending

# To write a large state takes longer than to read it where it is. So a lender leaves a file that
# says where its tensors are, in place of their bytes. Whoever reads the file copies them from the
# lender's memory, and compares their digest with the label's. The process ends once the next
# attempt has restored. If it ends before, the file leads nowhere, and the ranks elect another one.

SNAPSHOT_BYTES = 64 << 20
"""Largest state that is written in any case: that takes no longer than the next ranks need to
meet."""


@dataclass
class _Loan:
    """The state that this process lends."""

    ctx: WorkerContext
    label: Label
    state: dict[str, Any]
    open: ExitStack = field(default_factory=ExitStack)


_loan: _Loan | None = None


def leave(ctx: WorkerContext, state: dict[str, Any]) -> str | None:
    """Leave ``state``, whose tensors nothing changes any more. Return None, or why that cannot be
    done. Raises as ``leave_snapshot``."""
    if size_bytes(state) <= SNAPSHOT_BYTES or ctx.device.type != "cpu":
        if leave_snapshot(ctx, state) is None:
            return None
        # Shared memory is too small for it.
        state = state if ctx.device.type == "cpu" else copy_to_cpu(state)
    return _lend(ctx, state)


def lent_step() -> int | None:
    """Return the step of the state that this process lends; None for none."""
    return None if _loan is None else _loan.label.step


def write() -> str | None:
    """Write the state that this process lends as a snapshot, since the process is to end. Return
    why that cannot be done; None if it was written, or nothing is lent."""
    global _loan
    loan, _loan = _loan, None
    if loan is None:
        return None
    snapshot_store(loan.ctx).remove(loan.label)
    loan.open.close()
    try:
        return leave_snapshot(loan.ctx, loan.state)
    except RuntimeError as exc:
        return f"the state of step {loan.label.step} cannot be left: {exc}"


def _lend(ctx: WorkerContext, state: dict[str, Any]) -> str | None:
    """Lend ``state``, unless another rank of the node lends the same one."""
    global _loan
    own = _OwnState(ctx, state)
    with own.in_turn():
        if own.is_there():
            return None
        label = replace(own.label, digest=own.digest)
        loan = _Loan(ctx, label, state)
        store = snapshot_store(ctx)
        try:
            loan.label = store.lend(label, state, loan.open)
        except OSError as exc:
            loan.open.close()
            problem = f"the state cannot be lent: {exc}"
            logger.warning("step %d is not left on this node: %s", label.step, problem)
            with suppress(OSError):
                store.write_label(replace(label, digest=None, problem=problem))
            return problem
        store.remove_older(loan.label, keep=0)
        _loan = loan
    logger.info("this process lends the state of step %d", label.step)
    return None
