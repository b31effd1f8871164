"""The rows of a run's history at Weights & Biases: a pure function of the journals, so that every
process makes the same ones in the same order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.logs.journal_line import JournalEvent
from train_fn.journal.follower import measured

STEP = "step"
"""Column with the training step, the x-axis of all charts. W&B's own step counts rows."""


class Rows:
    """Converts events to rows. Of a step that is repeated after a failure, the first values
    stay."""

    def __init__(self) -> None:
        self._furthest = {EventKind.METRICS: 0, EventKind.EVALUATED: 0}

    def of(self, event: JournalEvent) -> Iterator[dict[str, float]]:
        """Yield the rows for an event. Most events have none."""
        if event.kind not in self._furthest:
            return
        for step, at, values in measured(event):
            if step > self._furthest[event.kind] and values:
                self._furthest[event.kind] = step
                yield {**values, STEP: step, "_timestamp": at}


def config_of(spec: RunSpec) -> dict[str, Any]:
    """Return the spec as W&B's config, without the names of secrets and the environment."""
    shown = spec.model_dump_json(exclude={"secrets", "env", "notify"}, exclude_none=True)
    config: dict[str, Any] = json.loads(shown)
    return config
