"""Fold a run's history into its reports on what ranks do."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from everstep.wire.events import EventKind
from everstep.wire.stacks import RankStack, StackReport
from service.model.rows import EventRow

KINDS: Final = frozenset({EventKind.STACKS_REQUESTED, EventKind.STACKS})


def stack_reports(events: Iterable[EventRow]) -> list[StackReport]:
    """Return a run's reports, oldest first, from its events of KINDS."""
    found: list[StackReport] = []
    for event in events:
        data, at = event.data, datetime.fromtimestamp(event.at, UTC)
        if event.kind == EventKind.STACKS_REQUESTED:
            found.append(StackReport(id=data["id"], at=at, attempt=event.attempt, complete=False))
            continue
        found = [each for each in found if each.id is None or each.id != data["id"]]
        found.append(
            StackReport(
                id=data["id"],
                at=at,
                attempt=event.attempt,
                complete=True,
                quiet_s=data.get("quiet_s"),
                step=data.get("step"),
                summary=data.get("summary"),
                ranks=tuple(RankStack.model_validate(each) for each in data.get("ranks") or ()),
            )
        )
    return found
