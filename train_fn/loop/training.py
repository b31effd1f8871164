"""What one rank trains with in an attempt, built whole before the first step, and how far the
attempt got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from everstep.wire.events import BEGINNINGS, EventKind
from train_fn.checkpoints.fork import adopt
from train_fn.checkpoints.safetensors_file import require_safetensors
from train_fn.checks.audit import RankFaults, StepAudit
from train_fn.checks.fits import require_best_metric
from train_fn.checks.ranks import check_data, check_model, check_numerics
from train_fn.checks.trained import LearningRates
from train_fn.context import WorkerContext
from train_fn.loop.build import Parts, optimizer_source
from train_fn.loop.epoch_end import EpochEnd
from train_fn.loop.evaluate import try_evaluation
from train_fn.loop.first_pass import join
from train_fn.loop.replica import Replica
from train_fn.loop.step import OwnStep, ShardedStep, StepExchange, TreeStep
from train_fn.samples.loader import Loader
from train_fn.samples.shares import SharePlanner
from train_fn.session.session import Session
from train_fn.session.speed import speed_of
from train_fn.snapshots.forgotten import sweep_forgotten
from train_fn.snapshots.keeper import Restored
from train_fn.state.contents import sketch_weights
from train_fn.state.tensor_tree import size_bytes
from train_fn.step.peers import bucket_sizes
from train_fn.step.profiler import StepProfiler
from train_fn.step.report_sums import StepPlans
from train_fn.step.timing import StepClock, StragglerWatch
from train_fn.tasks.protocol import where


class Rescuer(Protocol):
    """Keeps the state where the training thread cannot (``leave.Rescue``)."""

    def prepare(self) -> None: ...
    def step_committed(self) -> None: ...
    def note_work(self) -> None: ...
    def leave(self) -> int | None: ...


@dataclass(slots=True)
class RankProgress:
    """How far an attempt got. A failure at any point finds here what it has to leave behind."""

    phase: str = "start"
    """What the rank is doing, for the report of a failure."""
    replica: Replica | None = None
    """None until it is built."""
    session: Session | None = None
    """None until the replica is about to be restored."""
    is_restored: bool = False
    """Whether the replica's step is one of the run's."""
    training: Training | None = None
    """None until ``prepare`` has built it."""
    reported_checkpoint: int = 0
    """Step of the newest checkpoint that was reported to Ray Train; 0 for none."""
    own_s: float = 0.0
    """Seconds of this rank's own work in the last step."""
    rescue: Rescuer | None = None


@dataclass(slots=True, eq=False)
class Training:
    """Everything that the steps of one rank use. None of it is replaced between steps, but the
    loader if the ranks' shares change."""

    ctx: WorkerContext
    session: Session
    progress: RankProgress
    replica: Replica
    clock: StepClock
    stragglers: StragglerWatch | None
    """On rank 0 of several ranks only."""
    profiler: StepProfiler
    flips: RankFaults
    audit: StepAudit | None
    """None if no step is audited."""
    exchange: StepExchange
    planner: SharePlanner | None
    """None for equal shares."""
    loader: Loader
    plans: StepPlans
    rates: LearningRates
    epoch_end: EpochEnd


def prepare(ctx: WorkerContext, progress: RankProgress) -> Training:
    """Build the replica, restore the state that the ranks agree on, and build what a step uses.

    A collective. Records in ``progress`` what exists so far, also where it fails on the way.
    """
    sweep_forgotten(ctx)
    progress.replica = replica = Replica(ctx)
    parts = replica.parts
    require_best_metric(parts.task, parts.val_set, ctx.spec.checkpoint)
    if ctx.spec.checkpoint.safetensors:
        require_safetensors(replica.state.model.state_dict())
    progress.phase = "restore"
    session = Session(ctx, replica.state, replica.peers, int(ctx.spec.train.heirs))
    progress.session = session
    restore(session, replica, progress)
    source = session.restored.source
    progress.is_restored = True
    ctx.report_state_bytes(size_bytes(replica.state.state_dict()))
    if progress.rescue is not None:
        progress.rescue.prepare()
    # An attempt whose try failed may have left the state of step 0.
    if source in BEGINNINGS or replica.state.step == 0:
        progress.phase = "evaluation"
        try_evaluation(ctx, replica)
        progress.phase = "restore"
    if source == "checkpoint":
        replica.state.parent = session.restored.checkpoint
    progress.training = training = _build(session, progress, replica)
    return training


def restore(session: Session, replica: Replica, progress: RankProgress) -> None:
    """Join the peers and restore the newest trustworthy state. On return it is the same on every
    rank. Records the first pass in ``progress``. A collective.

    Raises:
        DataChanged: the data is not the same on all ranks, or not what the state was trained on.
        BadTask: the model is not the same on all ranks.
        ForkRefused: the run is to begin from another run's checkpoint, which cannot be used.
        StorageError: the storage does not answer, or has lost all checkpoints that the run had.
    """
    ctx, state = session.ctx, replica.state
    parts, peers, passes = replica.parts, replica.peers, replica.passes
    check_data(peers, state, parts.warn)

    def meet(restored: Restored) -> None:
        is_fresh = restored.source == "fresh"
        built, source = parts.built_weights, where(parts.task, "build_model")
        if is_fresh:
            every = parts.every_weight
            built = sketch_weights(state.model, all_of_it=True) if every is None else every
        check_model(peers, source, built, fresh=is_fresh)
        progress.phase = "first_pass"
        may_be_smaller = ctx.spec.train.on_out_of_memory == "smaller"
        begins = restored.source in BEGINNINGS or may_be_smaller
        join(ctx, replica, is_fresh=is_fresh, begins=begins)
        progress.phase = "restore"

    adopt_origin = partial(adopt, into=state, ctx=ctx)
    session.restore(adopt_origin, before_load=meet)
    parts.task_state.load(state.task)
    passes.moving.renew()
    check_numerics(ctx, peers, state, parts.numerics)
    session.announce()


def _build(session: Session, progress: RankProgress, replica: Replica) -> Training:
    """Build what a step uses. What may fail comes before what starts threads."""
    ctx, parts, passes = session.ctx, replica.parts, replica.passes
    state = parts.state
    planner = planner_of(ctx, replica)
    speed = speed_of(ctx, parts.task, parts.flops_per_sample)
    flips = RankFaults(ctx)
    rates = LearningRates(state.optimizer, optimizer_source(parts.task), state.scheduler)
    clock = StepClock(parts.trained.with_gradient, ctx.device)
    training = Training(
        ctx=ctx,
        session=session,
        progress=progress,
        replica=replica,
        clock=clock,
        stragglers=watch_stragglers(ctx, replica, by_speed=planner is not None),
        profiler=StepProfiler(ctx, lambda: bucket_sizes(passes.wrapped)),
        flips=flips,
        audit=audit_of(ctx, replica, flips),
        exchange=exchange_of(session, replica, rates),
        planner=planner,
        loader=loader_of(ctx, parts),
        plans=StepPlans(parts.sampler, ctx.world_rank, ctx.world_size),
        rates=rates,
        epoch_end=EpochEnd(session, replica, rates, clock),
    )
    session.open(speed, replica.peers.exchange)
    return training


def exchange_of(session: Session, replica: Replica, rates: LearningRates) -> StepExchange:
    """Return how the steps of this replica are exchanged."""
    passes, fingerprints = replica.passes, replica.together.fingerprints
    if replica.own is not None:
        return OwnStep(passes, fingerprints, replica.own, session, rates)
    if replica.order is not None:
        max_norm = session.ctx.spec.train.grad_clip_norm
        return ShardedStep(passes, fingerprints, replica.order, max_norm)
    if passes.tree is not None:
        return TreeStep(passes, fingerprints, passes.tree)
    return StepExchange(passes, fingerprints)


def audit_of(ctx: WorkerContext, replica: Replica, flips: RankFaults) -> StepAudit | None:
    """Return what audits the steps of this attempt, after a rehearsal; None if nothing does. A
    collective."""
    if not ctx.spec.train.audit_fraction:
        return None
    audit = StepAudit(ctx, replica.passes, replica.together, flips)
    if not replica.together.must_agree:
        replica.parts.warn(
            "no step of this attempt is audited (train.audit_fraction): the ranks' processors, "
            "libraries or settings differ, so their last bits may, too. Use one kind of node"
        )
        return None
    audit.rehearse()
    return audit


def watch_stragglers(
    ctx: WorkerContext, replica: Replica, *, by_speed: bool
) -> StragglerWatch | None:
    """Return the watch for slow ranks on rank 0 of several ranks, else None. A collective."""
    if ctx.world_size == 1:
        return None
    node_ids = replica.peers.gather(ctx.node_id)
    if ctx.world_rank != 0:
        return None
    sampler, world_size = replica.parts.sampler, ctx.world_size
    shares = [len(sampler.numbers(sampler.fullest, rank, world_size)) for rank in range(world_size)]
    return StragglerWatch(ctx.journal.emit, node_ids, shares, by_speed=by_speed)


def loader_of(ctx: WorkerContext, parts: Parts) -> Loader:
    """Return a loader of this rank's share, from the present step of the state on."""
    state = parts.state
    stream = parts.sampler.stream(state.epoch, state.k, ctx.world_rank, ctx.world_size)
    return Loader(parts.train_set, stream, ctx.spec, ctx.local_world_size, ctx.device)


# ---------------------------------------------------------------- shares

# How the ranks of an attempt divide each global batch, if that follows their speed.

MICRO_BATCH_S = "micro_batch_s"
"""What later attempts of this host know of it: seconds of a micro-batch."""


def planner_of(ctx: WorkerContext, replica: Replica) -> SharePlanner | None:
    """Return what plans the shares of this attempt, and let it begin with what the ranks' hosts
    know of their speed; None if shares are equal. A collective."""
    if ctx.spec.scaling.shares == "equal" or ctx.world_size == 1:
        return None
    sampler, tree = replica.parts.sampler, replica.passes.tree
    assert tree is not None, "a spec has it with train.exactness elastic alone"
    num_micro = sampler.num_micro(sampler.fullest)
    if num_micro <= ctx.world_size:
        replica.parts.warn(
            f"scaling.shares is by_speed, but a global batch has {num_micro} micro-batches for "
            f"{ctx.world_size} ranks, so none can take another's; lower train.micro_batch_size"
        )
        return None
    known = replica.peers.gather(ctx.remembered.get(MICRO_BATCH_S))
    planner = SharePlanner(sampler.division, num_micro, known)
    tree.divide_anew()
    return planner


def follow_speeds(training: Training, own_s: Sequence[float]) -> None:
    """Divide the next global batch otherwise if that pays. All ranks do the same, by the same
    numbers.

    Args:
        own_s: seconds of each rank's own work in the step before the last one, a full one.
    """
    planner, replica, ctx = training.planner, training.replica, training.ctx
    if planner is None or not planner.note(own_s):
        return
    assert replica.passes.tree is not None
    replica.passes.tree.divide_anew()
    training.plans = StepPlans(replica.parts.sampler, ctx.world_rank, ctx.world_size)
    training.loader.close()  # it has read ahead for the share of before
    training.loader = loader_of(ctx, replica.parts)
    if training.stragglers is not None:
        training.stragglers.divide_anew(planner.counts)
    training.clock.restart()
    ctx.remember(MICRO_BATCH_S, planner.costs[ctx.world_rank])
    report_shares(training)


def report_shares(training: Training) -> None:
    """Report the shares of this attempt, unless they are equal."""
    planner = training.planner
    if planner is not None and planner.costs:
        facts = {
            "step": training.replica.state.step,
            "micro_batches": list(planner.counts),
            "micro_batch_s": [round(each, 6) for each in planner.costs],
        }
        training.session.reporter.emit(EventKind.SHARES_PLANNED, facts)
