"""What holds for the states and samples of a protected loop, as its run reports it."""

from __future__ import annotations

from everstep.wire.events import EventKind
from train_fn.context import WorkerContext
from train_fn.protect.loop_state import LoopState
from train_fn.snapshots.publisher import snapshots_of
from train_fn.step.nccl import group_backend

EXACT = (
    "State and samples are exact: every sample of an epoch is used exactly once, whatever dies and "
    "at any world size; the ledger proves it."
)
UP_TO_LOADER = "The state is exact; which samples a step sees after a restart is up to your loader."
LOADER_RESTORED = (
    "The state is exact, and your loader goes on at the very batch at the same number of ranks; "
    "what its data set draws by itself is up to it."
)


def report_training(ctx: WorkerContext, state: LoopState, total_steps: int | None) -> None:
    """Report what is trained, and what holds for it.

    Args:
        total_steps: None if only the loop knows.
    """
    if ctx.world_rank != 0:
        return
    sampler = state.sampler
    ctx.journal.emit(
        EventKind.TRAINING_STARTED,
        {
            "total_steps": total_steps,
            "steps_per_epoch": sampler.steps_per_epoch if sampler else None,
            "num_samples": sampler.num_samples if sampler else None,
            "num_parameters": sum(value.numel() for value in state.parts.parameters()),
            "micro_batch_size": None,
            "snapshots": snapshots_of(ctx),
            "guarantee": guarantee(state),
            "device": str(ctx.device),
            "backend": group_backend(ctx.device),
        },
    )


def guarantee(state: LoopState) -> str:
    """Return what holds for the samples of a loop with this data."""
    if state.data is not None:
        return EXACT
    return LOADER_RESTORED if state.parts.loaders else UP_TO_LOADER
