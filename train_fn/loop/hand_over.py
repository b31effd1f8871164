"""How ranks make room for a group of another size that follows at once: nobody writes a checkpoint,
and their states stay in their processes."""

from __future__ import annotations

import gc

import torch.distributed as dist

from storage.run_control import Stop
from train_fn.loop.departure import keep_in_process
from train_fn.loop.outliving import may_serve_again
from train_fn.loop.training import Progress, Training


def hands_over(training: Training, stop: Stop) -> bool:
    """Return whether the ranks leave without a final checkpoint, since the next group goes on in
    processes of this one: rank 0 says so, and every process can serve it. A collective.

    Args:
        stop: why the ranks have stopped.
    """
    ctx, replica = training.ctx, training.replica
    if stop != "pause" or not ctx.in_process:
        return False
    may_leave = replica.state.complete and may_serve_again(
        training.progress.began, replica.parts, training.loader.processes
    )
    if ctx.world_rank == 0:
        may_leave = may_leave and ctx.hands_over() and not training.saver.has_best_to_write
    return all(replica.peers.gather(may_leave))


def hand_over(progress: Progress) -> None:
    """Leave an attempt that nothing broke, and keep its state in this process. All ranks are
    between the same two steps. Raises as ``TrainState.require_sound``."""
    replica, training = progress.replica, progress.training
    assert replica is not None and training is not None
    state = replica.state.state_dict()
    replica.state.require_sound(state)
    training.profiler.close()
    training.reporter.hand_over()
    training.publisher.close()
    training.reporter.close()
    training.saver.close()
    training.loader.close()
    training.clock.close()
    progress.replica = progress.training = None
    replica.let_go()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    keep_in_process(replica, training.ctx, state)
