"""One rank's part in an attempt: prepare, take the steps, finish; leave if something breaks.

Then what happens before the first step, where an epoch ends, where ranks make room for a
group of another size, and at the end.
"""

from __future__ import annotations

import gc
from typing import Any

from storage.run_control import Stop
from train_fn.checks.audit import NOT_WATCHED
from train_fn.checks.check import Moment
from train_fn.context import WorkerContext
from train_fn.errors import CheckpointFailed
from train_fn.loop.build import build_once
from train_fn.loop.commit import commit, proof_of, require_whole
from train_fn.loop.evaluate import evaluation_is_due, renew_best
from train_fn.loop.leave import Rescue, leave
from train_fn.loop.training import RankProgress, Training, follow_speeds, prepare, report_shares
from train_fn.recovery.launch import YIELDED, Left
from train_fn.samples.ledger import Count, difference
from train_fn.samples.sampler import MicroBatch
from train_fn.snapshots.leaving import leave_snapshot
from train_fn.step.nccl import group_backend
from train_fn.step.peers import end_process_group
from train_fn.step.precision import reproducibility
from train_fn.step.report import StepTotals, Votes
from train_fn.tasks.protocol import step_method

__all__ = ["build_once", "train", "train_openly"]


def train(ctx: WorkerContext, progress: RankProgress | None = None) -> Left | None:
    """Train this rank's share of every global batch. Return None when all steps are done, else the
    stop that all ranks agreed on.

    If the controller has asked the ranks to make room for a group that follows at once, they leave
    what they train on their nodes, and return ``YIELDED``.

    Args:
        progress: a new one, which says how far the attempt got.

    Raises StepFailed for whatever happened. By then the rank has left its state on its node, and
    has let its peers go.
    """
    progress = RankProgress() if progress is None else progress
    if ctx.spec.train.sharding == "none":  # else nodes keep pieces of every step
        progress.rescue = Rescue(ctx, progress)
    try:
        left = train_openly(ctx, progress)
        if progress.rescue is not None:
            progress.rescue.leave()
        if left == YIELDED:
            hand_over(progress)
        return left
    except BaseException as exc:
        failed = leave(ctx, progress, exc)
    # Outside the handler: a context would keep the frames of the broken attempt alive, and with
    # them the process group.
    raise failed


def train_openly(ctx: WorkerContext, progress: RankProgress) -> Left | None:
    """Like ``train``, but let every exception through. ``progress`` says what exists by then."""
    training = prepare(ctx, progress)
    state, last_step = training.replica.state, training.replica.parts.last_step
    is_best, stop = begin(training), None
    while state.step < last_step and stop is None:
        is_best, stop = take_step(training)
    if stop is not None and hands_over(training, stop):
        return YIELDED
    finish(training, is_best, stop)
    return stop


def take_step(training: Training) -> tuple[bool, Stop | None]:
    """Train one global batch. Return whether its state is the best so far, and the stop that all
    ranks agreed on."""
    session, replica, progress = training.session, training.replica, training.progress
    state, progress.phase = replica.state, "step"
    training.profiler.boundary(state.step)
    if training.audit is not None:
        training.audit.begin()
    totals = run_passes(training)  # a collective: it returns on every rank or on none
    require_whole(training, totals)  # the gate: every rank passes it, or none
    replica.together.require(totals)
    session.report_safe_steps()  # a collective if states are kept in pieces
    if training.audit is not None:
        training.audit.check()
    values = commit(training, totals)  # no collective: what one rank does here, all do
    training.ctx.on_commit()
    if progress.rescue is not None:
        progress.rescue.step_committed()
    replica.checks.at(Moment.STEP)
    if state.bookmarks is not None:
        state.bookmarks.exchange(state.step, replica.peers.gather)
    facts = totals.facts
    waited_s, num_tokens = max(totals.data_s), training.plans.of(state.step - 1).num_tokens
    step_s = session.reporter.step_done(
        values, facts.num_samples, proof_of(training), waited_s, num_tokens
    )
    is_full = replica.parts.sampler.is_full(state.step - 2)  # own_s is of the step before
    if training.stragglers is not None and is_full:
        training.stragglers.note(state.step - 1, totals.own_s, step_s)
    if facts.checkpoint_step > progress.reported_checkpoint:
        report_checkpoint(training, facts.checkpoint_step)
    stop = facts.stop if state.step < replica.parts.last_step else None
    may_be_due = state.k == 0 or state.step == replica.parts.total_steps
    is_best = stop is None and may_be_due and close_epoch(training)
    session.keep(is_due=facts.save, is_best=is_best)
    if is_full and stop is None and state.step < replica.parts.last_step:
        follow_speeds(training, totals.own_s)
    return is_best, stop


# ---------------------------------------------------------------- passes

# One step of one rank up to the gate: its micro-batches forward and backward.


def run_passes(training: Training) -> StepTotals:
    """Compute the gradients of the global batch's mean loss, and exchange the step's totals.

    A collective. It returns on every rank, or on none, with the same totals and gradients.
    """
    passes, exchange = training.replica.passes, training.exchange
    step, moving = training.replica.state.step, passes.moving
    plan = training.plans.of(step)
    exchange.begin(plan)
    if training.ctx.flip_ordered() is not None:
        training.flips.slow_down(training.progress.own_s)
    share = exchange.passes(plan.share)
    moving.begin(plan.num_samples, len(share))
    if training.progress.rescue is not None:
        training.progress.rescue.note_work()
    for position, micro in enumerate(share):
        batch, differs, own_samples, number = None, None, 0, 0 if micro is None else micro.number
        if position < len(plan.share):
            batch, differs = load_next(training, plan.share[position], plan.hashes[position])
            own_samples = len(plan.share[position].indices)
        elif micro is not None:
            batch = passes.load(micro).batch
        is_last = position == len(share) - 1
        watched = NOT_WATCHED if training.audit is None else training.audit.watched(number)
        with exchange.around(is_last), watched:
            if position:
                moving.rewind()
            passes.seed(step, number)
            loss_sum, weight = exchange.forward(batch, own_samples)
            moving.passed(own_samples, number)
            exchange.add(loss_sum, weight, differs)
            if is_last:
                exchange.last_pass(loss_sum, number, votes_of(training))
            else:
                exchange.pass_back(loss_sum, number)
    if not share:
        exchange.last_pass(None, None, votes_of(training))
    training.loader.prefetch()  # the device computes meanwhile
    # A GPU digests the sums once it has them, while this thread waits. A CPU may not have them yet.
    if exchange.digests_ahead:
        _start_digests(training)
    moving.wait()
    totals = exchange.take()
    if totals.fault(step, plan.num_samples) is None:
        if passes.used is not None:
            passes.used.drop_unused()
        if not exchange.digests_ahead:
            _start_digests(training)
    training.progress.own_s = training.clock.gate()
    return totals


def load_next(
    training: Training, micro: MicroBatch, expected_hash: int
) -> tuple[Any | None, Count | None]:
    """Return the next batch of the loader, and how its samples differ from those of ``micro``."""
    state, progress = training.replica.state, training.progress
    progress.phase = "data"
    loaded = next(training.loader)
    if loaded.batch is None:
        training.replica.passes.note_empty()
    differs = difference(state.epoch, state.step, micro.indices, loaded.indices, expected_hash)
    if state.bookmarks is not None:
        state.bookmarks.note(loaded)
    progress.phase = "step"
    return loaded.batch, differs


def votes_of(training: Training) -> Votes:
    """Start to exchange what forward passes changed, and return what this rank asks for. Every rank
    calls this once a step, before its last backward pass.

    Raise PeersGone if the attempt was given up.
    """
    training.session.require_current()
    progress, moving = training.progress, training.replica.passes.moving
    stop, committed, save = training.session.saver.decisions(progress.reported_checkpoint)
    moving.start()
    stop = training.ctx.journal.stop_requested or stop
    return Votes(stop, committed, save, progress.own_s, training.loader.take_wait_s())


def _start_digests(training: Training) -> None:
    """Start to digest the gradients that the ranks have summed, and a part of the weights. Drills
    flip their bits before. Only a step that is whole takes these digests."""
    replica, audit = training.replica, training.audit
    if training.ctx.flip_ordered() is not None:
        training.flips.flip(replica.parts, is_audited=audit is not None and audit.is_due)
    fingerprints = replica.together.fingerprints
    fingerprints.start(replica.state.step, gradient=replica.own is None)


# ---------------------------------------------------------------- beginning

# What an attempt does between the restored state and its first step.


def begin(training: Training) -> bool:
    """Save what cannot wait, claim the run, and finish what the last attempt left undone at this
    step. A collective.

    Return whether the present state is the best so far.
    """
    ctx, session, replica = training.ctx, training.session, training.replica
    # After its first save a fork no longer depends on the run that it comes from. A fork that is
    # evaluated now is saved afterwards, with its metrics.
    is_unsaved_fork = session.restored.origin is not None
    if is_unsaved_fork:
        if not evaluation_is_due(ctx, replica.parts):
            session.save(is_due=True, is_best=True)
            is_unsaved_fork = False
    elif renew_best(ctx, replica.state, replica.peers):
        session.save(is_due=False, is_best=True)
    session.begin(_facts(training))
    report_shares(training)
    is_best = close_epoch(training, is_new=False)
    if (is_best or is_unsaved_fork) and replica.state.step < replica.parts.last_step:
        session.save(is_due=is_unsaved_fork, is_best=True)
    session.keeper.begin()
    session.reporter.start_clock()
    return is_best


def close_epoch(training: Training, *, is_new: bool = True) -> bool:
    """Do what is due where an epoch ends (``EpochEnd.close``)."""
    training.progress.phase = "evaluation"
    return training.epoch_end.close(is_new=is_new)


def _facts(training: Training) -> dict[str, object]:
    """Return the data of the ``training_started`` event."""
    ctx, parts = training.ctx, training.replica.parts
    state, sampler = parts.state, parts.sampler
    is_first = state.step == 0 or ctx.attempt == 1
    return {
        "total_steps": parts.last_step,
        "steps_per_epoch": sampler.steps_per_epoch,
        "num_samples": sampler.num_samples,
        "num_parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "micro_batch_size": sampler.micro_batch_size,
        # before the attempt's first step
        "rests": evaluation_is_due(ctx, parts) or state.hook_due,
        "guarantee": parts.train_set.guarantee() if is_first else None,
        "snapshots": training.session.keeper.snapshots,
        "warnings": list(parts.warnings),
        "device": str(ctx.device),
        "backend": group_backend(ctx.device),
        "reproducible": reproducibility(ctx.spec.train.exactness, compiled=ctx.spec.train.compile),
    }


# ---------------------------------------------------------------- hand over

# How ranks make room for a group of another size that follows at once: nobody writes a checkpoint,
# and their states stay on their nodes.


def hands_over(training: Training, stop: Stop) -> bool:
    """Return whether the ranks leave without a final checkpoint, since the next group follows at
    once: rank 0 says so. A collective.

    Args:
        stop: why the ranks have stopped.
    """
    ctx, replica = training.ctx, training.replica
    if stop != "pause" or training.session.keeper.has_gate:
        return False  # the nodes of a smaller group may lack pieces
    may_leave = replica.state.complete
    if ctx.world_rank == 0:
        saver = training.session.saver
        may_leave = may_leave and ctx.hands_over() and not saver.has_best_to_write
    return all(replica.peers.gather(may_leave))


def hand_over(progress: RankProgress) -> None:
    """Leave an attempt that nothing broke, and its state on this node. All ranks are between the
    same two steps. Raises as ``TrainState.require_sound``, and CheckpointFailed where the state
    cannot be left."""
    replica, training = progress.replica, progress.training
    assert replica is not None and training is not None
    state = replica.state.state_dict()
    replica.state.require_sound(state)
    training.profiler.close()
    session = training.session
    session.reporter.hand_over()
    session.keeper.close()
    session.reporter.close()
    session.saver.close()
    training.loader.close()
    training.clock.close()
    progress.replica = progress.training = progress.session = None
    replica.let_go()
    gc.collect()
    end_process_group()
    problem = leave_snapshot(training.ctx, state)
    if problem is not None:
        raise CheckpointFailed(f"the state cannot be handed over: {problem}")


# ---------------------------------------------------------------- final checkpoint

# The end of an attempt that nothing broke: its final checkpoint is committed and reported.


def finish(training: Training, is_best: bool, stop: Stop | None) -> None:
    """Check what no step has, then commit and report the final checkpoint. A collective.

    Args:
        is_best: whether the present state is the best so far.
        stop: why the ranks agreed to stop; None if all steps are done.
    """
    replica, progress = training.replica, training.progress
    progress.phase = "checkpoint"
    replica.checks.at(Moment.LEAVING, step_method(replica.parts.task))
    if replica.state.frozen is not None:
        replica.state.frozen.require_unchanged(thorough=True)
    training.profiler.close()
    training.session.report_safe_steps()
    training.session.finish(
        stop,
        is_best=is_best,
        reported=progress.reported_checkpoint,
        on_saved=lambda step: report_checkpoint(training, step),
        close=training.loader.close,
    )


def report_checkpoint(training: Training, step: int) -> None:
    """Report a committed checkpoint to Ray Train. All ranks call this at the same step."""
    training.progress.reported_checkpoint = step
    ctx, state = training.ctx, training.replica.state
    state.parent = str(ctx.checkpoint_name(step))
    ctx.report_checkpoint(state.parent, dict(state.metrics))
