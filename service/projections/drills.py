"""Fold a run's history into its drills and their reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from everstep.wire import RunStatus, Verdict
from everstep.wire.drills import Drill, DrillKind, DrillParity, DrillReport, DrillState
from everstep.wire.events import OWN_FILES, EventKind
from service.model.rows import EventRow
from service.projections.parity import parity

KINDS: Final = frozenset(
    {
        EventKind.DRILL_REQUESTED,
        EventKind.DRILL_STARTED,
        EventKind.DRILL_FAILED,
        EventKind.FAILURE,
        EventKind.RESTORED,
        EventKind.RECOVERED,
        EventKind.EPOCH_COMPLETED,
        EventKind.SUBMISSION_STARTED,
        EventKind.STATUS,
    }
)
"""Events that stories are made of. Metrics are read separately, only around drills, because a run
has many."""

METRICS_BEFORE: Final = 2000
"""Number of metrics events before a drill that are searched for losses."""
METRICS_MOST: Final = 6000


@dataclass
class Story:
    """The events that make up one drill."""

    requested: EventRow
    started: EventRow | None = None
    failed: EventRow | None = None
    failure: EventRow | None = None
    restored: EventRow | None = None
    recovered: EventRow | None = None
    epoch: EventRow | None = None
    """Event of the first epoch that ended after the recovery."""
    over: bool = False
    """Whether no more events can follow: the run ended or paused, or another driver took over
    before the drill started."""

    @property
    def id(self) -> str:
        return str(self.requested.data["id"])

    @property
    def state(self) -> DrillState:
        if self.failed is not None:
            return DrillState.FAILED
        if self.recovered is not None:
            return DrillState.RECOVERED
        if self.started is not None:
            return DrillState.UNRECOVERED if self.over else DrillState.STARTED
        return DrillState.LAPSED if self.over else DrillState.REQUESTED

    def take(self, event: EventRow) -> None:
        """Add the run's next event; not for events that name a drill."""
        recovering = self.started is not None and self.recovered is None and not self.over
        follows = self.started is not None and event.attempt > self.started.attempt
        match event.kind:
            case EventKind.FAILURE if recovering and self.failure is None:
                self.failure = event
            case EventKind.RESTORED if recovering and follows:
                self.restored = event
            case EventKind.RECOVERED if recovering and follows:
                self.recovered = event
            case EventKind.EPOCH_COMPLETED if self.recovered is not None and self.epoch is None:
                self.epoch = event
            case EventKind.SUBMISSION_STARTED if (
                self.started is None and event.submission > self.requested.submission
            ):
                self.over = True
            case EventKind.STATUS if (
                RunStatus(event.data["to"]).terminal or event.data["to"] == RunStatus.PAUSED
            ):
                self.over = True


def stories(events: Iterable[EventRow]) -> list[Story]:
    """Return a run's drills, oldest first, from its events of KINDS."""
    found: dict[str, Story] = {}
    for event in events:
        match event.kind:
            case EventKind.DRILL_REQUESTED:
                for story in found.values():
                    story.over |= story.started is None  # replaced by the newer one
                found[event.data["id"]] = Story(event)
            case EventKind.DRILL_STARTED if event.data["id"] in found:
                found[event.data["id"]].started = event
                found[event.data["id"]].over = False
            case EventKind.DRILL_FAILED if event.data["id"] in found:
                found[event.data["id"]].failed = event
            case _:
                for story in found.values():
                    story.take(event)
    return list(found.values())


def drill(story: Story, metrics: Sequence[EventRow]) -> Drill:
    """Return one drill as clients read it; ``metrics`` are the metrics events around it, in
    order."""
    data = story.requested.data
    return Drill(
        id=data["id"],
        kind=DrillKind(data["kind"]),
        rank=data["rank"],
        at=_time(story.requested.at),
        state=story.state,
        problem=None if story.failed is None else str(story.failed.data["problem"]),
        report=None
        if story.started is None or story.failed is not None
        else _report(story, story.started, metrics),
    )


def _report(story: Story, started: EventRow, metrics: Sequence[EventRow]) -> DrillReport:
    restored = story.restored.data if story.restored else {}
    recovered = story.recovered.data if story.recovered else {}
    rejected = tuple(str(item["name"]) for item in restored.get("rejected") or ())
    return DrillReport(
        started_at=_time(started.at),
        node_id=started.data.get("node_id"),
        pid=started.data.get("pid"),
        checkpoint=started.data.get("checkpoint"),
        verdict=_verdict(story.failure),
        total_s=None
        if story.recovered is None
        else round(max(0.0, story.recovered.at - started.at), 3),
        recovery_s=recovered.get("recovery_s"),
        phases=_phases(recovered),
        steps_lost=recovered.get("steps_lost"),
        redone_s=(recovered.get("since_report_s") or 0.0) if restored.get("unit") else None,
        world_size_before=recovered.get("world_size_before"),
        world_size_after=recovered.get("world_size_after"),
        restored_step=restored.get("step"),
        restored_from=restored.get("checkpoint") or restored.get("source"),
        rejected=rejected,
        parity=_parity(story, metrics),
        note=_note(story, started, restored, rejected),
    )


def _phases(recovered: Mapping[str, Any]) -> dict[str, float]:
    detect_s = recovered.get("detect_s")
    return ({} if detect_s is None else {"detect": detect_s}) | (recovered.get("phases") or {})


def _parity(story: Story, metrics: Sequence[EventRow]) -> DrillParity | None:
    if story.recovered is None or story.restored is None or _has_own_files(story):
        return None
    epoch = story.epoch.data if story.epoch else None
    once = None if epoch is None else epoch["duplicates"] == epoch["missing"] == 0
    return parity(
        metrics,
        story.recovered,
        int(story.restored.data["step"]),
        over=story.over,
        samples_used_once=once,
    )


def _note(
    story: Story, started: EventRow, restored: Mapping[str, Any], rejected: Sequence[str]
) -> str | None:
    if story.recovered is not None and _has_own_files(story):
        return (
            "the script continues from its own files: which steps it repeats, and whether its "
            "loss continues, is not known"
        )
    if story.recovered is not None and restored.get("unit"):
        since_s = story.recovered.data.get("since_report_s")
        worked = "" if since_s is None else f", of {since_s:.1f} s here,"
        return (
            f"steps are the reports of the user's loop: work since the last report{worked} is done "
            "again and counts as no step lost"
        )
    checkpoint = started.data.get("checkpoint")
    if checkpoint is None or story.recovered is None:
        return None
    went_on = (
        f"from {restored.get('checkpoint') or restored.get('source')}, step {restored.get('step')}"
    )
    if checkpoint in rejected:
        return (
            f"the damaged checkpoint {checkpoint} was found and skipped; the run continued "
            f"{went_on}"
        )
    return (
        f"the damaged checkpoint {checkpoint} was not needed: the run continued {went_on}; the "
        "fallback was not tested"
    )


def _has_own_files(story: Story) -> bool:
    return story.restored is not None and story.restored.data.get("source") == OWN_FILES


def _verdict(failure: EventRow | None) -> Verdict | None:
    if failure is None:
        return None
    return Verdict(failure.data["verdict"])


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
