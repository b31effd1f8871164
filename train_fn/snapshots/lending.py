"""Leave a state on this node for the next attempt: small ones as a snapshot, large ones in the
memory of the process that holds them, which lends it.

To write a large state takes longer than to read it where it is. So a lender leaves a file that says
where its tensors are, in place of their bytes. Whoever reads the file copies them from the lender's
memory, and compares their digest with the label's. The process ends once the next attempt has
restored. If it ends before, the file leads nowhere, and the ranks elect another state.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from train_fn.context import WorkerContext
from train_fn.snapshots.publisher import in_turn_unless_there, leave_snapshot
from train_fn.snapshots.store import Label, snapshot_store
from train_fn.state.tensor_tree import copy_to_cpu, size_bytes

SNAPSHOT_BYTES = 64 << 20
"""Largest state that is written in any case: that takes no longer than the next ranks need to
meet."""

logger = logging.getLogger(__name__)


class _Loan:
    """The state that this process lends."""

    def __init__(self, ctx: WorkerContext, label: Label, state: dict[str, Any]) -> None:
        self.ctx, self.label, self.state = ctx, label, state
        self.open = ExitStack()


_loan: _Loan | None = None


def leave(ctx: WorkerContext, state: dict[str, Any]) -> str | None:
    """Leave ``state``, whose tensors nothing changes any more. Return None, or why that cannot be
    done. Raises as ``leave_snapshot``."""
    if size_bytes(state) <= SNAPSHOT_BYTES or ctx.device.type != "cpu":
        if leave_snapshot(ctx, state) is None:
            return None
        # Shared memory is too small for it.
        state = state if ctx.device.type == "cpu" else copy_to_cpu(state)
    return _lend(ctx, state)


def lent_step() -> int | None:
    """Return the step of the state that this process lends; None for none."""
    return None if _loan is None else _loan.label.step


def write() -> str | None:
    """Write the state that this process lends as a snapshot, since the process is to end. Return
    why that cannot be done; None if it was written, or nothing is lent."""
    global _loan
    loan, _loan = _loan, None
    if loan is None:
        return None
    snapshot_store(loan.ctx).remove(loan.label)
    loan.open.close()
    try:
        return leave_snapshot(loan.ctx, loan.state)
    except RuntimeError as exc:
        return f"the state of step {loan.label.step} cannot be left: {exc}"


def _lend(ctx: WorkerContext, state: dict[str, Any]) -> str | None:
    """Lend ``state``, unless another rank of the node lends the same one."""
    global _loan
    with in_turn_unless_there(ctx, state) as label:
        if label is None:
            return None
        loan = _Loan(ctx, label, state)
        store = snapshot_store(ctx)
        try:
            loan.label = store.lend(label, state, loan.open)
        except OSError as exc:
            loan.open.close()
            problem = f"the state cannot be lent: {exc}"
            logger.warning("step %d is not left on this node: %s", label.step, problem)
            with suppress(OSError):
                store.write_label(replace(label, digest=None, problem=problem))
            return problem
        store.remove_older(loan.label, keep=0)
        _loan = loan
    logger.info("this process lends the state of step %d", label.step)
    return None
