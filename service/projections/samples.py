"""Fold a run's history into its sample counts, epoch by epoch, over the committed lineage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from everstep.wire import EpochSamples, SampleOrigin, Samples
from everstep.wire.events import EventKind
from service.model.rows import EventRow

KINDS: Final = frozenset({EventKind.EPOCH_COMPLETED, EventKind.RESTORED})


def samples(events: Iterable[EventRow]) -> Samples:
    """Return the counts of each completed epoch. A restore before its end removes them: the epoch
    will end again."""
    ended: dict[int, EpochSamples] = {}
    origin: SampleOrigin | None = None
    for event in events:
        if event.kind == EventKind.EPOCH_COMPLETED:
            counts = EpochSamples.model_validate(event.data)
            ended[counts.epoch] = counts
        elif event.kind == EventKind.RESTORED:
            ended = {
                epoch: counts for epoch, counts in ended.items() if epoch < event.data["epoch"]
            }
            if event.data.get("origin"):
                origin = SampleOrigin.model_validate(event.data["origin"])
    return Samples(epochs=tuple(ended[epoch] for epoch in sorted(ended)), origin=origin)
