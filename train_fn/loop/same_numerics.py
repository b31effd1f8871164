"""Compare what the ranks' kernels compute, between ranks and with the attempts before."""

from __future__ import annotations

import logging

from everstep.wire.events import EventKind
from train_fn.context import WorkerContext
from train_fn.errors import NumericsChanged, PeersGone
from train_fn.loop.replica import Replica
from train_fn.state.numerics import Numerics

logger = logging.getLogger(__name__)


def check_numerics(ctx: WorkerContext, replica: Replica) -> None:
    """Compare every rank's fingerprint with that of the state; in a run's first attempt, with that
    of rank 0. Report what differs. A collective.

    Raise NumericsChanged on a rank that differs, and PeersGone on the others, if
    ``train.exactness`` is elastic.
    """
    mine, state = replica.parts.numerics, replica.state
    if mine is None:
        return
    ranks: list[tuple[str, Numerics]] = replica.peers.gather((ctx.node_id, mine))
    is_first = state.numerics is None
    expected = Numerics(**state.numerics) if state.numerics is not None else ranks[0][1]
    state.numerics = expected.dump()
    differing = [
        {
            "rank": rank,
            "node_id": node_id,
            "differs": expected.differences(found),
            "kernels": expected.unlike(found),
        }
        for rank, (node_id, found) in enumerate(ranks)
        if expected.differences(found)
    ]
    if not differing:
        return
    reference = "rank 0" if is_first else "the state"
    if ctx.world_rank == 0:
        ctx.journal.emit(
            EventKind.NUMERICS_CHANGED,
            {"step": state.step, "reference": reference, "ranks": differing},
        )
    own = [entry for entry in differing if entry["rank"] == ctx.world_rank]
    if replica.exchange is None:
        for entry in own:
            logger.warning("this rank computes other bits than %s: %s", reference, entry)
        return
    ctx.journal.flush(0.0)
    if not own:
        raise PeersGone("another rank computes other bits, and was refused")
    raise NumericsChanged(ctx.node_id, reference, expected.differences(mine), expected.unlike(mine))
