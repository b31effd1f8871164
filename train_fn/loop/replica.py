"""One rank's replica: what it trains, the passes over it, and the checks that are made of both."""

from __future__ import annotations

from train_fn.checks.check import Check, Checks
from train_fn.checks.order import CallOrder
from train_fn.checks.ranks import SameAfterStep, Together
from train_fn.checks.trained import DataKept, ExtraKept, ModesKept, WeightsKept
from train_fn.context import WorkerContext
from train_fn.loop.build import build_parts, was_built
from train_fn.loop.own_step import OwnUpdates
from train_fn.loop.passes import Passes
from train_fn.node.network import lowered_level
from train_fn.step.peers import Peers
from train_fn.step.precision import set_determinism
from train_fn.tasks.protocol import makes_own_steps, step_method
from train_fn.user_code.packages import bring_packages


class Replica:
    """What is trained on one rank."""

    def __init__(self, ctx: WorkerContext) -> None:
        """Build it from the spec, the same on every rank. Nothing is exchanged yet."""
        spec, train = ctx.spec, ctx.spec.train
        bring_packages(ctx)  # all ranks wait there for those that are new
        if not was_built():
            set_determinism(train.wants_determinism, ctx.device)  # the build may choose otherwise
        self.parts = parts = build_parts(ctx)
        self.state = state = parts.state
        self.peers = peers = Peers(ctx.world_rank, ctx.world_size, ctx.device)
        self.passes = Passes(spec, parts, peers)
        self.order = None if state.gathered is None else CallOrder([state.model], peers)
        """Only of a sharded model."""
        self.together = Together(ctx, peers, state, parts.trained, step_method(parts.task))
        checks: list[Check] = [
            DataKept(parts.train_set),
            ModesKept(state.model),
            ExtraKept(state.model),
            parts.trained,
            WeightsKept(parts.trained),
            self.together,
        ]
        if getattr(parts.task, "after_step", None) is not None:
            checks.append(SameAfterStep(peers, state))
        self.checks = Checks(checks)
        """In the order in which they are made."""
        self.own: OwnUpdates | None = None
        """None unless the task makes its own steps."""
        if makes_own_steps(parts.task):
            self.own = OwnUpdates(parts.task, state, self.checks, peers, train.grad_clip_norm)
        if not spec.recovery.in_process:
            parts.warn("recovery.in_process has no effect any more; leave it out of the spec")
        if debugging := lowered_level():
            parts.warn(debugging)
        if (most := spec.most_workers) < spec.scaling.max_workers:
            parts.warn(
                f"scaling.max_workers is {spec.scaling.max_workers}, but a global batch has {most} "
                f"micro-batches, so the run uses at most {most} ranks; lower "
                "train.micro_batch_size to use more"
            )

    @property
    def order_at_first(self) -> CallOrder | None:
        """Return the order of a sharded model's calls in the first two steps; else None."""
        return self.order if self.state.is_at_first else None

    def let_go(self) -> None:
        """Take off what ties the replica to the peers of this attempt."""
        self.passes.let_go()
        if self.own is not None:
            self.own.mean.remove_hooks()
