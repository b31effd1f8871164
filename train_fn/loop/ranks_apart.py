"""Ranks whose weights or gradients went apart: name who differs, and strike every state that may
hold the wrong bits.

After each step all ranks must hold the same bits. A rank that does not has computed, received or
stored something wrongly. What it computed since then is in the gradients of all, so the run goes
back to a state from before.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Sequence

from storage.errors import StorageError
from storage.run_control import Distrust
from train_fn.context import WorkerContext
from train_fn.errors import FOUND_WITHIN, PeerApart, RanksApart
from train_fn.loop.replica import Replica
from train_fn.snapshots.store import snapshot_store
from train_fn.state.contents import few
from train_fn.step.step_totals import StepTotals

logger = logging.getLogger(__name__)


def require_together(ctx: WorkerContext, replica: Replica, totals: StepTotals) -> None:
    """Raise RanksApart, or PeerApart on ranks that most others agree with, if ranks differed after
    the step before. All ranks decide alike, by the same totals.

    Ranks with other kernels may round differently: then it is only logged, once.
    """
    if not totals.are_ranks_apart:
        return
    if not replica.must_agree:
        if not replica.is_apart:
            logger.warning(
                "weights or gradients of the ranks differ after step %d. Their kernels differ, or "
                "are not deterministic, so they may round differently",
                replica.state.step,
            )
        replica.is_apart = True
        return
    own = replica.fingerprints
    try:
        found = replica.peers.gather((own.gradient, own.weights, replica.trained.sums()))
    except Exception as exc:  # what is known already must not be lost
        logger.warning("the ranks could not compare which tensors differ: %s", exc)
        raise_apart(ctx, replica, totals.fingerprints(), "weights or gradients")
    names = {name for _, _, sums in found for name in replica.trained.differing(found[0][2], sums)}
    what = [f"weights {few(sorted(names))}"] if names else []
    if len({gradient for gradient, _, _ in found}) > 1:
        what.append(f"the summed gradient of step {replica.state.step}")
    if not what:
        what.append("a part of the weights")
    raise_apart(ctx, replica, totals.fingerprints(), " and ".join(what))


def raise_apart(
    ctx: WorkerContext,
    replica: Replica,
    of_ranks: Sequence[Hashable],
    what: str,
    odd: tuple[int, ...] | None = None,
) -> None:
    """Strike the states that may be wrong, then raise RanksApart on the ranks that differ from most
    others, and PeerApart on these. Without a majority all ranks raise RanksApart.

    Args:
        of_ranks: by rank, what is equal on ranks that agree.
        what: what differs, in words.
        odd: the ranks that are wrong, if that is known by other means.
    """
    step = replica.state.step
    trusted_step = max(replica.begun_at, step - FOUND_WITHIN)
    odd = odd_ranks(of_ranks) if odd is None else odd
    strike(ctx, trusted_step)
    error = RanksApart(step, odd, what, trusted_step)
    if odd and ctx.world_rank not in odd:
        raise PeerApart(str(error), trusted_step)
    raise error


def odd_ranks(of_ranks: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the ranks that differ from most; none if there is no majority."""
    usual, count = Counter(of_ranks).most_common(1)[0]
    if 2 * count <= len(of_ranks):
        return ()
    return tuple(rank for rank, value in enumerate(of_ranks) if value != usual)


def strike(ctx: WorkerContext, trusted_step: int) -> None:
    """Let no attempt begin from a later state of this one or an older one."""
    snapshot_store(ctx).remove_after(trusted_step)
    try:
        ctx.run_dir.distrust(Distrust(ctx.submission, ctx.attempt, trusted_step))
    except StorageError as exc:
        logger.error(
            "it could not be written that states after step %d are not to be trusted: %s. Another "
            "rank may have written it; else a checkpoint after that step may be wrong",
            trusted_step,
            exc,
        )
