"""Published snapshots: rank 0 keeps recent states on its node while training goes on, if all ranks
are on that node.

If one of several ranks dies, its peers keep the state. If all die at once, or there is only one,
the next attempt would have to continue from a durable checkpoint without them."""

from __future__ import annotations

import logging
import threading
import time
from typing import Literal

from everstep.wire.events import EventKind
from train_fn.checkpoints.state_copy import BoundaryCopies, BoundaryCopy
from train_fn.context import WorkerContext
from train_fn.snapshots.leaving import publish_snapshot, shortage
from train_fn.snapshots.store import snapshot_store
from train_fn.state.kept_state import KeptState

COST_RATIO = 100.0
"""The next publication comes after so many times what the last one took: at most 1 % of the time
goes into them."""

Snapshots = Literal["published", "survivors"]
"""Who keeps states on nodes: rank 0 all the time, or the survivors when an attempt breaks."""

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

    Args:
        insures: whether no snapshot holds the state that the attempt began with. The first one is
            then published at once, wherever the ranks are.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        state: KeptState,
        copies: BoundaryCopies,
        *,
        insures: bool = False,
    ) -> None:
        self._ctx, self._state, self._copies = ctx, state, copies
        self._active = ctx.world_rank == 0 and snapshots_of(ctx) == "published"
        self._cadence = Cadence(COST_RATIO)
        self._lock = threading.Condition()
        self._waiting: BoundaryCopy | None = None
        self._writing = False
        self._closed = False
        self._problem: str | None = None
        self._checked = self._is_running = False
        self._insures = insures
        if self._active:
            self._start()

    def offer(self, *, due: bool | None = None) -> None:
        """Publish the present state in the background if it is due. Called by the training thread,
        between two steps.

        Args:
            due: what ``is_due`` has returned since the last step; None if nobody has asked.
        """
        insures, self._insures = self._insures, False
        if insures:
            self.keep()
        elif not self._active:
            self._check_room()
        elif self.is_due() if due is None else due:
            self._hand_over()

    def is_due(self) -> bool:
        """Return whether to publish the present state. On a GPU the first publication waits until a
        thread has pinned memory for it; training does not."""
        if not self._active or not self._cadence.is_due(time.monotonic()):
            return False
        with self._lock:
            is_free = self._waiting is None and not self._writing and not self._closed
        return is_free and self._copies.is_ready()

    def keep(self) -> None:
        """Publish the present state, due or not, also where survivors leave states. Called before
        code of the user runs that may end all ranks at once."""
        if self._ctx.world_rank == 0 and not self._closed:
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
        self._cadence.done(began - copy.stall_s, copy.stall_s + time.monotonic() - began)
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
