"""How a rank leaves a protected loop that an error ended: it lets its peers go, and keeps its
state."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

from train_fn.context import WorkerContext
from train_fn.errors import StepNotWhole
from train_fn.loop.departure import keep_state, not_copied
from train_fn.node.broken_device import keep_if_broken
from train_fn.own_loop import Left
from train_fn.protect.training import Training
from train_fn.recovery.rank_error import describe_error
from train_fn.step.nccl import fails_by_itself
from train_fn.step.peers import end_process_group

_TORN = (
    "the rank was between two states: an optimizer had stepped, and state.step() had not been "
    "called. Call it right after the optimizer's step, or pass torn='shadow'"
)


def leave(
    ctx: WorkerContext, training: Training | None, cause: BaseException
) -> tuple[Left, StepNotWhole | None]:
    """Let the peers go, and leave the state of the last commit on this node.

    Return how the loop was left, and the fault that the ranks' last words show.

    Args:
        training: None if the error came before it was built.
    """
    error = describe_error(cause, ctx.world_rank)
    keep_if_broken(ctx.device, cause, training)
    fault, is_known = None, False
    frees_peers = fails_by_itself()
    if training is not None:
        training.saver.close()
        is_known, fault = training.commits.settle()
    gc.collect()
    if frees_peers:
        end_process_group()
    step = kept_step = None
    problem: str | None = "the rank had no state yet"
    if training is not None:
        training.publisher.close()
        step = training.state.step
        kept_step, problem = _keep(training, is_known)
    if not frees_peers:
        end_process_group()
    if training is not None:
        training.reporter.close()
    if fault is not None:
        error = describe_error(fault, ctx.world_rank)
    error = dataclasses.replace(error, step=step, phase="protect", snapshot_step=kept_step)
    return Left(error, problem), fault


def _keep(training: Training, is_known: bool) -> tuple[int | None, str | None]:
    """Return the steps done in the state that is left on this node, or why there is none."""
    found: dict[str, Any] | str = ""

    def whole() -> dict[str, Any] | str:
        nonlocal found
        found = state_to_keep(training, is_known)
        return found

    problem = keep_state(training.ctx, training.state, whole)
    return (found["step"] if problem is None and isinstance(found, dict) else None), problem


def state_to_keep(training: Training, is_known: bool) -> dict[str, Any] | str:
    """Return the state of the newest commit that may be left, or why there is none.

    Args:
        is_known: whether all ranks are known to have made the newest commit.
    """
    commits, shadows, state = training.commits, training.shadows, training.state
    updates = commits.updates
    if commits.fault is not None:
        if shadows is not None and shadows.older is not None:
            return shadows.older  # the ranks agreed on that one
        return f"the ranks did not make the same step: {commits.fault}"
    if not is_known and not updates.is_regular:
        return (
            f"step {state.step} made {updates.of_commit} optimizer steps instead of "
            f"{updates.usual}, and a peer that died did not say whether it did, too"
        )
    if state.complete and (problem := training.boundary.problem()) is not None:
        return problem
    if shadows is not None:
        return shadows.newest or _TORN
    if not state.complete:
        return _TORN
    found = state.last_committed()
    return not_copied(found) if isinstance(found, list) else found
