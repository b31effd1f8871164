"""Check that the loss continues after a recovery as before. ``everstep.wire.drills.DrillParity``
describes the comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Final

from everstep.wire.drills import DrillParity
from service.model.rows import EventRow

NUM_STEPS: Final = 10
"""Number of steps compared on each side of the recovery."""
SAME_SIZE_TOLERANCE: Final = 1e-4
OTHER_SIZE_TOLERANCE: Final = 1e-2
"""Relative. Another number of ranks sums in another order, and the difference grows with repeated
steps."""
_SPREAD: Final = 3.0
_SHARE: Final = 0.1

Loss = float | None


def parity(
    metrics: Sequence[EventRow],
    recovered: EventRow,
    restored_step: int,
    *,
    over: bool,
    samples_used_once: bool | None,
) -> DrillParity:
    """Compare losses around a recovery.

    Args:
        metrics: metrics events in order, from before the fault to after the recovery.
        recovered: the ``recovered`` event. Steps beyond ``restored_step`` that its attempt or later
            ones report come after it.
        restored_step: steps done in the restored state.
        over: whether no more steps will follow.
        samples_used_once: result of the sample ledger for the first epoch that ended after the
            recovery; None if there is none.
    """
    reported: dict[int, list[Loss]] = {}
    later: dict[int, Loss] = {}
    for event, step, loss in _losses(metrics):
        reported.setdefault(step, []).append(loss)
        if event.attempt >= recovered.attempt and step > restored_step:
            later.setdefault(step, loss)
    after = {step: later[step] for step in sorted(later)[:NUM_STEPS]}
    before = {
        step: reported[step][-1]
        for step in sorted(step for step in reported if step <= restored_step)[-NUM_STEPS:]
    }
    looked_at = range(min(before, default=restored_step + 1), max(after, default=restored_step) + 1)
    missing = tuple(step for step in looked_at if step not in before and step not in after)
    data = recovered.data
    same_size = data.get("world_size_before") == data.get("world_size_after")
    tolerance = SAME_SIZE_TOLERANCE if same_size else OTHER_SIZE_TOLERANCE
    conflicting = tuple(step for step in looked_at if _differ(reported.get(step, []), tolerance))
    enough = over or len(after) == NUM_STEPS
    goes_on = (
        not missing
        and not conflicting
        and _keeps_trend(list(before.values()), list(after.values()))
    )
    return DrillParity(
        in_parity=goes_on and samples_used_once is not False if enough else None,
        num_steps_after=len(after),
        missing_steps=missing,
        conflicting_steps=conflicting,
        loss_before=_mean(list(before.values())) if len(before) > 1 else None,
        loss_after=_mean(list(after.values())),
        samples_used_once=samples_used_once,
    )


def _losses(metrics: Sequence[EventRow]) -> Iterator[tuple[EventRow, int, Loss]]:
    for event in metrics:
        for point in event.data["points"]:
            if "loss" in point["values"]:
                yield event, int(point["step"]), point["values"]["loss"]


def _differ(losses: Sequence[Loss], tolerance: float) -> bool:
    """Return whether one step has two different losses."""
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        return bool(finite)
    return bool(finite) and max(finite) - min(finite) > tolerance * max(map(abs, finite))


def _keeps_trend(before: Sequence[Loss], after: Sequence[Loss]) -> bool:
    """Return whether the mean after is finite and exceeds the mean before by no more than losses
    vary from step to step."""
    mean_after = _mean(after)
    known = [loss for loss in before if loss is not None]
    if mean_after is None:
        return False
    if len(known) < 2:
        return True  # the fault came in the first steps: there is no trend to compare with
    return mean_after <= fmean(known) + max(_SPREAD * stdev(known), _SHARE * abs(fmean(known)))


def _mean(losses: Sequence[Loss]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    return fmean(finite) if finite and len(finite) == len(losses) else None
