"""States that every rank holds whole: survivors leave theirs on their nodes when an attempt breaks.

If one of several ranks dies, its peers keep the state. If all die at once, or there is only one,
the next attempt would have to continue from a durable checkpoint. So if all ranks are on one node,
rank 0 publishes recent states there while training goes on.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from everstep.wire.events import EventKind
from train_fn.checkpoints.save_slot import BoundaryCopies, BoundaryCopy
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, StateNotWhole, TrainError
from train_fn.recovery.evidence import RankError
from train_fn.snapshots.election import Candidate, Elected, Rejection, snapshot_name
from train_fn.snapshots.keeper import Exchange, Remains, Restored, StateKeeper, Unusable
from train_fn.snapshots.leaving import leave_snapshot, publish_snapshot, shortage
from train_fn.snapshots.restore import read_sound
from train_fn.snapshots.store import snapshot_store
from train_fn.state.run_state import RunState
from train_fn.state.tensor_tree import (
    TensorShape,
    put_together,
    shapes,
    take_apart,
    tree_digest,
)
from train_fn.step.fingerprints import word_sum
from train_fn.step.peers import Peers

COST_RATIO = 100.0
"""The next publication comes after so many times what the last one took: at most 1 % of the time
goes into them."""

_SOON_RATIO = 10.0
"""The same where a state is worth more than others."""

logger = logging.getLogger(__name__)


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


class WholeKeeper(StateKeeper):
    """Keep states that every rank holds whole (``StateKeeper``): on one node, rank 0 publishes.

    It reports when the node's memory becomes too small for a state, and when it is large enough
    again.
    """

    def __init__(self, ctx: WorkerContext, peers: Peers, state: RunState) -> None:
        self._ctx, self._peers, self._state = ctx, peers, state
        self.snapshots = "published" if ctx.num_nodes == 1 else "survivors"
        self._active = ctx.world_rank == 0 and self.snapshots == "published"
        self._cadence, self._soon = Cadence(COST_RATIO), Cadence(_SOON_RATIO)
        self._lock = threading.Condition()
        self._waiting: BoundaryCopy | None = None
        self._writing = False
        self._closed = False
        self._problem: str | None = None
        self._checked = self._is_running = False

    # -- restore

    def read(self, elected: Elected) -> tuple[dict[str, Any] | None, Unusable]:
        """Return an elected state on the ranks of its node. Raises BadTask for one in pieces."""
        candidate = elected.candidate
        assert candidate is not None
        if candidate.label.pieces > 1:
            raise BadTask(
                f"the state of step {candidate.label.step} is of a sharded model; shard this one "
                "by fully_shard as well, or start a new run"
            )
        is_here = Candidate(self._peers.rank, candidate.label) in elected.candidates
        own = read_sound(self._ctx, self._state, candidate.label) if is_here else (None, None)
        problem = self._peers.share(own[1], candidate.rank)
        if problem is None:
            return own[0], {}
        return None, {candidate: Rejection(snapshot_name(candidate.label), problem)}

    def spread(self, restored: Restored, found: dict[str, Any] | None) -> dict[str, Any]:
        if restored.source == "fresh" and self._peers.rank == restored.holder:
            found = self._state.state_dict()
        return broadcast(self._peers, found, restored.holder)

    # -- steps

    def open(self, copies: BoundaryCopies, exchange: Exchange, restored: Restored) -> None:
        self._copies = copies
        if self._active:
            self._start()

    def after_step(self, due: bool | None = None) -> None:
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

    def publish_now(self, *, if_soon: bool = False) -> None:
        if if_soon and not self._soon.is_due(time.monotonic()):
            return
        if self._ctx.world_rank == 0 and not self._closed:
            if not self._is_running:
                self._start()
            self._hand_over()

    # -- the ends

    def leave_unsaved(self) -> None:
        leave_snapshot(self._ctx, self._state.state_dict())

    def leave(
        self,
        error: RankError,
        last_committed: Callable[[], dict[str, Any] | str],
        *,
        distrusted: str | None = None,
    ) -> Remains:
        self.close()
        step = self._state.step
        if distrusted is not None:
            return Remains(step, distrusted)
        try:
            found = last_committed()
            if isinstance(found, str):
                return Remains(step, found)
            self._state.require_sound(found)
            problem = leave_snapshot(self._ctx, found)
        except TrainError as exc:  # what broke the attempt says more
            return Remains(step, str(exc))
        except RuntimeError as exc:  # so does a device that cannot be read any more
            logger.warning("the state of step %d cannot be read: %s", step, exc)
            return Remains(step, f"the state cannot be read from {self._ctx.device}: {exc}")
        return Remains(step, problem, found["step"] if problem is None else None)

    # -- the thread that publishes

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

    def begin_last_save(self) -> None:
        self.close()

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
        kept = self.snapshots if problem is None else "none"
        if problem is not None:
            logger.warning(
                "no snapshot of step %d is kept on this node: %s; durable checkpoints remain",
                step,
                problem,
            )
        self._ctx.journal.emit(
            EventKind.SNAPSHOTS, {"step": step, "snapshots": kept, "problem": problem}
        )


# ---------------------------------------------------------------- broadcast

# A restored state on its way from the rank that has it to all others.

CHUNK_BYTES = 32 << 20
"""Tensors travel in pieces of about this size, so that a rank needs little more memory than the
state takes."""
_IN_FLIGHT = 2
"""Pieces that travel while an earlier one is checked."""


class _Sent(NamedTuple):
    """A piece on its way: tensors of one dtype in a row."""

    part: list[TensorShape]
    flat: torch.Tensor
    work: dist.Work | None


def broadcast(peers: Peers, state: dict[str, Any] | None, holder: int) -> dict[str, Any]:
    """Return ``state`` of rank ``holder`` on every rank. A collective.

    Other ranks pass None, or the same state if they have it already. Nothing travels if all have
    it. Otherwise the structure travels first, then the tensors, in pieces of one dtype. Every rank
    compares what arrived with what the holder sent before anything is returned.

    Raises:
        PeersGone: a peer is gone, so that the state did not arrive whole.
        StateNotWhole: other bytes arrived than the holder sent.
    """
    are_lacking = peers.gather(state is None)
    if state is not None and not any(are_lacking):
        return state
    tensors: list[torch.Tensor] = []
    skeleton = peers.share(take_apart(state, tensors) if peers.rank == holder else None, holder)
    parts = _chunks(sorted(shapes(skeleton), key=lambda shape: shape.position))
    sums, arrived = [tree_digest(skeleton)], []
    for sent in _in_flight(peers, parts, tensors, holder):
        if sent.work is not None:
            sent.work.wait()
        flat = peers.result(sent.flat)
        sums.append(str(word_sum(flat)))
        if state is None:
            pieces = torch.split(flat, [shape.numel for shape in sent.part])
            arrived += [
                piece.view(shape.shape) for shape, piece in zip(sent.part, pieces, strict=True)
            ]
    _require_the_same(peers, sums, holder, skeleton["step"])
    if state is not None:
        return state
    received: dict[str, Any] = put_together(skeleton, arrived)
    return received


def _in_flight(
    peers: Peers, parts: list[list[TensorShape]], tensors: list[torch.Tensor], holder: int
) -> Iterator[_Sent]:
    """Start to send each part, and yield it once the next ones travel, too."""
    waiting: deque[_Sent] = deque()
    for part in parts:
        flat = _flat(peers, part, tensors if peers.rank == holder else None)
        waiting.append(_Sent(part, flat, peers.start_broadcast(flat, holder)))
        if len(waiting) > _IN_FLIGHT:
            yield waiting.popleft()
    yield from waiting


def _flat(
    peers: Peers, part: list[TensorShape], tensors: list[torch.Tensor] | None
) -> torch.Tensor:
    """Return the part's tensors in a row, or memory for them."""
    if tensors is None:
        num_elements = sum(shape.numel for shape in part)
        return torch.empty(num_elements, dtype=part[0].dtype, device=peers.device)
    rows = [tensors[shape.position].to(peers.device).reshape(-1) for shape in part]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _require_the_same(peers: Peers, sums: list[str], holder: int, step: int) -> None:
    """Raise StateNotWhole on every rank if one of them received other bytes than were sent."""
    digests = peers.gather(hashlib.sha256(repr(sums).encode()).hexdigest())
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[holder]]
    if differing:
        raise StateNotWhole(
            step,
            f"rank {', '.join(map(str, differing))} received other bytes than rank {holder} sent. "
            "Have the network between their nodes checked",
        )


def _chunks(tensors: list[TensorShape]) -> list[list[TensorShape]]:
    """Group tensors of one dtype into pieces not much larger than CHUNK_BYTES, in order."""
    chunks: list[list[TensorShape]] = []
    size = 0
    for tensor in tensors:
        if not chunks or chunks[-1][0].dtype != tensor.dtype or size >= CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(tensor)
        size += tensor.nbytes
    return chunks
