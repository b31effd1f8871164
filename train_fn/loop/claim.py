"""The last thing before an attempt's first step: its beginning is durable, and nobody has taken the
run over."""

from __future__ import annotations

from storage.claims import successor
from storage.errors import StorageUnavailable
from train_fn.context import WorkerContext
from train_fn.errors import Replaced

CLAIM_S = 30.0
"""Longest wait until the event of an attempt's beginning is durable."""


def claim(ctx: WorkerContext) -> None:
    """Make sure that this attempt's beginning is durable, and then that no newer submission or
    attempt has begun. Called by rank 0 before the first step; without it no rank can take one.

    A submission writes its journal before it reads those of older ones, and an attempt writes its
    claim first. So the newer one either sees where this attempt began, and which states that makes
    void, or this attempt sees the newer one's journal or claim here, and leaves no state.

    Raises:
        StorageUnavailable: the beginning did not become durable.
        Replaced: a newer submission, or attempt, has begun.
    """
    if not ctx.journal.flush(CLAIM_S):
        raise StorageUnavailable(
            f"the journal did not take the attempt's beginning within {CLAIM_S:g} s; is the "
            "storage writable?"
        )
    newest = max(ctx.run_dir.submissions(), default=0)
    if newest > ctx.submission:
        raise Replaced(
            f"submission {newest} of run {ctx.run_dir.run_id} has taken over from submission "
            f"{ctx.submission}"
        )
    why = successor(ctx.run_dir, (ctx.submission, ctx.attempt))
    if why is not None:
        raise Replaced(why)
