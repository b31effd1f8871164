"""What a protected loop trains with in an attempt, built whole before its first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from train_fn.checkpoints.fork import Origin
from train_fn.checkpoints.saver import Saver
from train_fn.checkpoints.state_copy import BoundaryCopies
from train_fn.context import WorkerContext
from train_fn.loop.claim import claim
from train_fn.loop.newest_checkpoint import Restored
from train_fn.loop.reporter import Reporter
from train_fn.loop.restore import announce, take_over
from train_fn.protect.agreement import Agreement
from train_fn.protect.arguments import Torn
from train_fn.protect.attributes import AttributeWatch
from train_fn.protect.boundary import Boundary
from train_fn.protect.commits import Commits
from train_fn.protect.gradients import Gradients
from train_fn.protect.loop_state import LoopState
from train_fn.protect.updates import Updates
from train_fn.protect.volatile import SharedBuffers
from train_fn.protect.watch import OrderWatch
from train_fn.snapshots.forgotten import sweep_forgotten
from train_fn.snapshots.publisher import Publisher
from train_fn.state.shadows import Shadows
from train_fn.step.peers import Peers


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """Everything that the steps of one rank use. None of it is replaced between steps."""

    ctx: WorkerContext
    state: LoopState
    restored: Restored
    """Where the attempt begins."""
    peers: Peers
    buffers: SharedBuffers
    watch: OrderWatch
    boundary: Boundary
    gradients: Gradients
    attributes: AttributeWatch
    commits: Commits
    shadows: Shadows | None
    """Only with ``torn='shadow'``."""
    reporter: Reporter
    saver: Saver
    publisher: Publisher


def prepare(ctx: WorkerContext, state: LoopState, torn: Torn) -> Training:
    """Restore the state that the ranks agree on, and build what a step uses. A collective."""
    peers = Peers(ctx.world_rank, ctx.world_size, ctx.device)
    sweep_forgotten(ctx)
    restored = take_over(ctx, peers, state, _adopted)
    announce(ctx, state, restored)
    if ctx.world_rank == 0:
        claim(ctx)
    parts = state.parts
    agreement, reporter = Agreement(peers), Reporter(ctx, state)
    copies = BoundaryCopies(state)
    watch = OrderWatch(state, peers)
    shadows = Shadows(state) if torn == "shadow" else None
    # What may fail comes before what starts threads.
    return Training(
        ctx=ctx,
        state=state,
        restored=restored,
        peers=peers,
        buffers=SharedBuffers(parts.wrapped, peers),
        watch=watch,
        boundary=Boundary(state, watch, shadows.renew if shadows is not None else lambda: None),
        gradients=Gradients(state),
        attributes=AttributeWatch({} if parts.keeps_more else parts.models),
        commits=Commits(ctx, state, agreement, Updates(may_skip=parts.has_scaler), reporter),
        shadows=shadows,
        reporter=reporter,
        saver=Saver(ctx, state, copies),
        publisher=Publisher(ctx, state, copies),
    )


def _adopted(state: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """Return another run's state as the initial one of this run. Its data may be another, and so
    may be the weights that are trained."""
    kept = {name: value for name, value in state["own_loop"].items() if name in _OF_A_FORK}
    loaders = {
        name: {**each, "marks": None} if isinstance(each, dict) and "marks" in each else each
        for name, each in state["loaders"].items()
    }
    changed = {"best": None, "parent": origin.name, "tail": "[]", "contents": None}
    return {**state, **changed, "loaders": loaders, "own_loop": kept}


_OF_A_FORK = frozenset({"data", "epoch_began"})
"""What a fork takes over of what belongs to a loop alone."""
