"""The end of an attempt that nothing broke: its final checkpoint is committed and reported."""

from __future__ import annotations

import logging

from storage.run_control import Stop
from train_fn.checkpoints.saver import FINAL_PATIENCE_S, MEET_S, STOP_PATIENCE_S, Saver
from train_fn.loop.built_alike import require_same_weights
from train_fn.loop.training import Training
from train_fn.snapshots.leaving import leave_snapshot
from train_fn.snapshots.store import snapshot_store
from train_fn.step.peers import Peers
from train_fn.tasks.own_step import step_method

logger = logging.getLogger(__name__)


def finish(training: Training, is_best: bool, stop: Stop | None) -> None:
    """Commit and report the final checkpoint, then remove the run's snapshots from this node. A
    collective.

    A run that pauses because its storage fails leaves its state on the node instead. Raises
    CheckpointFailed on every rank if the final checkpoint cannot be committed.

    Args:
        is_best: whether the present state is the best so far.
        stop: why the ranks agreed to stop; None if all steps are done.
    """
    replica, saver, progress = training.replica, training.saver, training.progress
    progress.phase = "checkpoint"
    replica.trained.check(step_method(replica.task))
    require_same_weights(replica, step_method(replica.task), training.ctx)
    if replica.state.frozen is not None:
        replica.state.frozen.require_unchanged(thorough=True)
    training.profiler.close()
    training.reporter.hand_over()
    # Before the ranks meet below: the first rank that leaves removes the node's snapshots, and
    # nothing may be published after that.
    training.publisher.close()
    error, committed = save_last_state(
        replica.peers, saver, stop, is_best=is_best, reported=progress.reported_checkpoint
    )
    if committed > progress.reported_checkpoint:
        report_checkpoint(training, committed)
    training.reporter.close()
    saver.close()
    training.loader.close()
    if error is not None:
        logger.warning(
            "stopped without a final checkpoint; the state stays on this node: %s", error
        )
        leave_snapshot(training.ctx, replica.state.state_dict())
    else:
        snapshot_store(training.ctx).remove_all()


def save_last_state(
    peers: Peers, saver: Saver, stop: Stop | None, *, is_best: bool, reported: int
) -> tuple[Exception | None, int]:
    """Commit the present state as the final checkpoint. A collective.

    Return why it was not committed (only for a run that pauses because its saves fail, which stops
    without one), and the step of a committed checkpoint that is newer than step ``reported``; 0 for
    none. Raises CheckpointFailed on every rank.
    """
    saving = saver.begin_last(
        is_best=is_best, patience_s=FINAL_PATIENCE_S if stop is None else STOP_PATIENCE_S
    )
    # The ranks meet again and again: a save may take longer than a collective may.
    while not peers.share(saver.has_ended(saving, MEET_S), 0):
        pass
    error = saving.exception()
    is_unsaved = error is not None and stop is not None and saver.stop is not None
    outcome = error, is_unsaved, saver.newest_committed(reported)
    error, is_unsaved, committed = peers.share(outcome, 0)
    if error is not None and not is_unsaved:
        raise error
    return error, committed


def report_checkpoint(training: Training, step: int) -> None:
    """Report a committed checkpoint to Ray Train. All ranks call this at the same step."""
    training.progress.reported_checkpoint = step
    ctx, state = training.ctx, training.replica.state
    state.parent = str(ctx.checkpoint_name(step))
    ctx.report_checkpoint(state.parent, dict(state.metrics))
