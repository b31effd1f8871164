"""Published snapshots: rank 0 keeps recent states on its node while training goes on, if all ranks
are on that node.

If one of several ranks dies, its peers keep the state. If all die at once, or there is only one,
the next attempt would have to continue from a durable checkpoint without them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from everstep.wire.events import EventKind
from train_fn.checkpoints.save_slot import BoundaryCopies, BoundaryCopy
from train_fn.context import WorkerContext
from train_fn.snapshots.state_file import state_digest
from train_fn.snapshots.store import Label, SnapshotStore, snapshot_store
from train_fn.state.run_state import RunState
from train_fn.state.tensor_tree import size_bytes

COST_RATIO = 100.0
"""The next publication comes after so many times what the last one took: at most 1 % of the time
goes into them."""

_SOON_RATIO = 10.0
"""The same where a state is worth more than others."""

Snapshots = Literal["published", "survivors", "every_n", "own_node"]
"""Who keeps states on nodes: rank 0 all the time, or the survivors when an attempt breaks. Of a
sharded model, every rank its piece: a rank of another node has it after some steps, or never."""

logger = logging.getLogger(__name__)


def snapshots_of(ctx: WorkerContext) -> Snapshots:
    """Return who keeps states for this group of ranks."""
    return "published" if ctx.num_nodes == 1 else "survivors"


class Cadence:
    """Decides when the next publication is due, by what the last one cost."""

    def __init__(self, ratio: float = COST_RATIO) -> None:
        self._ratio = ratio
        self._due_at: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether a publication is due; the first one at once. ``now`` is monotonic seconds."""
        return self._due_at is None or now >= self._due_at

    def done(self, began: float, cost_s: float) -> None:
        """Note a publication: when it began, and what copy, digest and write took."""
        self._due_at = began + self._ratio * cost_s


class Publisher:
    """Publishes on rank 0 of a group on one node; elsewhere every call returns at once.

    It reports when the node's memory becomes too small for a state, and when it is large enough
    again.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        state: RunState,
        copies: BoundaryCopies,
    ) -> None:
        self._ctx, self._state, self._copies = ctx, state, copies
        is_published = ctx.world_rank == 0 and snapshots_of(ctx) == "published"
        self._active = is_published and state.piece is None  # ``holdings.py`` keeps those
        self._cadence, self._soon = Cadence(COST_RATIO), Cadence(_SOON_RATIO)
        self._lock = threading.Condition()
        self._waiting: BoundaryCopy | None = None
        self._writing = False
        self._closed = False
        self._problem: str | None = None
        self._checked = self._is_running = False
        if self._active:
            self._start()

    def offer(self, *, due: bool | None = None) -> None:
        """Publish the present state in the background if it is due. Called by the training thread,
        between two steps.

        Args:
            due: what ``is_due`` has returned since the last step; None if nobody has asked.
        """
        if not self._active:
            self._check_room()
        elif self.is_due() if due is None else due:
            self._hand_over()

    def is_due(self) -> bool:
        """Return whether to publish the present state. The first publication of a state that is
        large, or on a GPU, waits until a thread has taken memory for it; training does not."""
        if not self._active or not self._cadence.is_due(time.monotonic()):
            return False
        with self._lock:
            is_free = self._waiting is None and not self._writing and not self._closed
        return is_free and self._copies.is_ready()

    def keep(self, *, if_soon: bool = False) -> None:
        """Publish the present state, due or not, also where survivors leave states. Called before
        code of the user runs that may end all ranks at once. With ``if_soon``, do so only if the
        last publication is ten times as long ago as it took."""
        if if_soon and not self._soon.is_due(time.monotonic()):
            return
        if self._ctx.world_rank == 0 and not self._closed and self._state.piece is None:
            if not self._is_running:
                self._start()
            self._hand_over()

    def _start(self) -> None:
        self._is_running = True
        threading.Thread(target=self._run, name="snapshot-publisher", daemon=True).start()

    def _hand_over(self) -> None:
        copy = self._copies.take()
        with self._lock:
            if self._waiting is not None:
                self._copies.release(self._waiting)
            self._waiting = copy
            self._lock.notify_all()

    def close(self) -> None:
        """Publish no more. On return, a write that was under way is complete."""
        with self._lock:
            self._closed = True
            if self._waiting is not None:
                self._copies.release(self._waiting)
                self._waiting = None
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._writing)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting is not None or self._closed)
                if self._waiting is None:
                    return
                copy, self._waiting, self._writing = self._waiting, None, True
            try:
                self._publish(copy)
            finally:
                with self._lock:
                    self._writing = False
                    self._lock.notify_all()

    def _publish(self, copy: BoundaryCopy) -> None:
        began = time.monotonic()
        try:
            problem = publish_snapshot(self._ctx, copy.state)
        except Exception as exc:  # training goes on without
            logger.exception("publishing the state of step %d failed", copy.step)
            problem = f"{type(exc).__name__}: {exc}"
        for cadence in (self._cadence, self._soon):
            cadence.done(began - copy.stall_s, copy.stall_s + time.monotonic() - began)
        self._report(copy.step, problem)
        self._copies.release(copy)

    def _check_room(self) -> None:
        """Check once, after the first step, whether a state fits: survivors write when it is too
        late to warn."""
        if self._checked or self._ctx.world_rank != 0:
            return
        self._checked = True
        self._report(
            self._state.step, shortage(snapshot_store(self._ctx), self._state.state_dict())
        )

    def _report(self, step: int, problem: str | None) -> None:
        """Report it when states begin, or cease, to be kept."""
        if (problem is None) == (self._problem is None):
            return
        self._problem = problem
        kept = snapshots_of(self._ctx) if problem is None else "none"
        if problem is not None:
            logger.warning(
                "no snapshot of step %d is kept on this node: %s; durable checkpoints remain",
                step,
                problem,
            )
        self._ctx.journal.emit(
            EventKind.SNAPSHOTS, {"step": step, "snapshots": kept, "problem": problem}
        )


# ---------------------------------------------------------------- leaving

# Leave a state on this node, for the next attempt to continue from.
#
# The ranks of a node take turns. While one writes, the others digest their own states. A rank that
# finds its state there by then writes nothing. If the writer died, the next rank writes.

OVERHEAD_BYTES = 4 << 20
"""Room for everything but tensors."""
TURN_S = 2.0
"""How long a rank at least waits for the others of its node to leave their states,"""
_SLOWEST_BYTES_PER_S = 500e6
"""and how fast it expects that of memory."""
_TURN_POLL_S = 0.002


def leave_snapshot(ctx: WorkerContext, state: dict[str, Any]) -> str | None:
    """Leave ``state`` on this node in place of all older ones, or a label that says why not. Return
    None, or the problem.

    Ranks of one node take turns, and a rank that finds the same state there writes no other: one of
    each rank may not fit. Tensors may be on any device. Raises BadTask for a value that could not
    be loaded again, RuntimeError if a device cannot be read, and what ``SnapshotStore.write`` does.
    """
    own = _OwnState(ctx, state)
    patience_s = TURN_S + size_bytes(state) / _SLOWEST_BYTES_PER_S
    with _in_turn(own.store, patience_s, own.compare):
        # by another rank, or published
        problem = None if own.is_there() else own.leave_if_it_fits()
    if problem is None:
        own.store.remove_older(own.label, keep=0)
    else:
        logger.warning("step %d is not left on this node: %s", state["step"], problem)
        with suppress(OSError):
            own.store.write_label(replace(own.label, problem=problem))
    return problem


@contextmanager
def in_turn_unless_there(ctx: WorkerContext, state: dict[str, Any]) -> Iterator[Label | None]:
    """Let the ranks of this node in, one after the other. Yield the label for this rank's state,
    with its digest, or None if another one has left the same state."""
    own = _OwnState(ctx, state)
    patience_s = TURN_S + size_bytes(state) / _SLOWEST_BYTES_PER_S
    with _in_turn(own.store, patience_s, own.compare):
        own.compare()
        yield None if own.is_there() else replace(own.label, digest=own.digest)


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
    def digest(self) -> str:
        return state_digest(self._state)

    def compare(self) -> None:
        """Take the digest now, since another rank's will be there to compare with."""
        _ = self.digest

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


@contextmanager
def _in_turn(
    store: SnapshotStore,
    patience_s: float,
    meanwhile: Callable[[], None],
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
