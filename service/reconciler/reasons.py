"""The reasons that a queued run shows while it waits."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.wire import Reason, ReasonCode
from service.reconciler.capacity import amounts
from service.reconciler.facts import RunFacts


def infeasible(run: RunFacts, needs: Mapping[str, float], all_room: int) -> Reason:
    missing = run.min_workers - all_room
    more = amounts({name: amount * missing for name, amount in needs.items()})
    message = (
        f"min_workers {run.min_workers} of {amounts(needs)} each ({run.placement_strategy}) can "
        "never fit: the whole cluster has "
        f"room for {all_room}; {more} more are missing. Add nodes, or lower scaling.min_workers "
        "or scaling.resources_per_worker."
    )
    return Reason(code=ReasonCode.INFEASIBLE, message=message)


def waiting(run: RunFacts, needs: Mapping[str, float], why: str) -> Reason:
    message = f"waits for room for {run.min_workers} workers of {amounts(needs)} each; {why}"
    return Reason(code=ReasonCode.WAITING_FOR_CAPACITY, message=message)


def quota_reason(why: str) -> Reason:
    return Reason(code=ReasonCode.WAITING_FOR_CAPACITY, message=why)
