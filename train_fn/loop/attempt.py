"""One rank's part in an attempt: prepare, take the steps, finish; leave if something breaks."""

from __future__ import annotations

from contextlib import nullcontext

from storage.run_control import Stop
from train_fn.context import WorkerContext
from train_fn.loop.beginning import begin
from train_fn.loop.boundary import close_boundary
from train_fn.loop.built_alike import require_same_after_step
from train_fn.loop.commit import commit, require_whole
from train_fn.loop.departure import leave
from train_fn.loop.elastic_step import elastic_step
from train_fn.loop.final_checkpoint import finish, report_checkpoint
from train_fn.loop.gradients import forward_backward
from train_fn.loop.hand_over import hand_over, hands_over
from train_fn.loop.own_step import make_step
from train_fn.loop.ranks_apart import require_together
from train_fn.loop.rescue import Rescue
from train_fn.loop.survivor import build_ahead
from train_fn.loop.training import Progress, Training, prepare
from train_fn.recovery.launch import YIELDED, Left
from train_fn.step.place_watch import watching

__all__ = ["build_ahead", "train", "train_openly"]


def train(ctx: WorkerContext, progress: Progress | None = None) -> Left | None:
    """Train this rank's share of every global batch. Return None when all steps are done, else the
    stop that all ranks agreed on.

    If the controller has asked the ranks to make room for a group that follows at once, they keep
    what they train in their processes, and return ``YIELDED``.

    Args:
        progress: a new one, which says how far the attempt got.

    Raises StepFailed for whatever happened. By then the rank has left its state on its node, or
    keeps it in its process, and has let its peers go.
    """
    progress = Progress() if progress is None else progress
    progress.rescue = rescue = Rescue(ctx, progress)
    try:
        with watching() if ctx.in_process else nullcontext():
            left = train_openly(ctx, progress)
        rescue.leave()
        if left == YIELDED:
            hand_over(progress)
        return left
    except BaseException as exc:
        failed = leave(ctx, progress, exc)
    # Outside the handler: a context would keep the frames of the broken attempt alive, and with
    # them the process group.
    raise failed


def train_openly(ctx: WorkerContext, progress: Progress) -> Left | None:
    """Like ``train``, but let every exception through. ``progress`` says what exists by then."""
    training = prepare(ctx, progress)
    replica = training.replica
    state = replica.state
    is_best, stop = begin(training), None
    while state.step < replica.last_step and stop is None:
        is_best, stop = take_step(training)
    if stop is not None and hands_over(training, stop):
        return YIELDED
    finish(training, is_best, stop)
    return stop


def take_step(training: Training) -> tuple[bool, Stop | None]:
    """Train one global batch. Return whether its state is the best so far, and the stop that all
    ranks agreed on."""
    replica, reporter, progress = training.replica, training.reporter, training.progress
    state, progress.phase = replica.state, "step"
    training.profiler.boundary(state.step)
    if training.audit is not None:
        training.audit.begin()
    # A collective: it returns on every rank or on none.
    if replica.exchange is not None:
        totals = elastic_step(training, replica.exchange)
    elif replica.own_updates is not None:
        totals = make_step(training)
    else:
        totals = forward_backward(training)
    require_whole(replica, totals)  # the gate: every rank passes it, or none
    require_together(training.ctx, replica, totals)
    if training.audit is not None:
        training.audit.check(totals)
    values = commit(training, totals)  # no collective: what one rank does here, all do
    training.ctx.on_commit()
    if progress.rescue is not None:
        progress.rescue.step_committed()
    if replica.after_step is not None:
        require_same_after_step(replica)
    if state.bookmarks is not None:
        state.bookmarks.exchange(state.step, replica.peers.gather)
    facts = totals.facts
    step_s = reporter.step_done(values, facts.num_samples, state.chain.newest)
    if training.stragglers is not None:
        training.stragglers.note(state.step - 1, totals.own_s, step_s)
    if facts.checkpoint_step > progress.reported_checkpoint:
        report_checkpoint(training, facts.checkpoint_step)
    stop = facts.stop if state.step < replica.last_step else None
    is_best = stop is None and close_boundary(training)
    training.saver.offer(due=facts.save, is_best=is_best)
    training.publisher.offer()
    return is_best, stop
