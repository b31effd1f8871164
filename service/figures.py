"""What this service saw happen to runs, counted for Prometheus: it begins at zero with every
process, as counters may."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from everstep.wire import Verdict
from everstep.wire.events import UNFIT, EventKind
from service.model.run_rows import RunRow
from storage.logs.journal import JournalEvent

_RECOVERY_S: Final = (0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300, 900)
_STALL_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_WRITE_S: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_LAG_S: Final = (0.25, 0.5, 1, 1.5, 2.5, 5, 10, 30, 60, 300)
_QUEUE_S: Final = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)

log = structlog.get_logger(__name__)


class RunFigures:
    """Counters and histograms of one process; ``clock`` gives unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._last_verdict: dict[str, str] = {}
        self._projects: set[str] = set()
        registry = self.registry
        self.queue_s = Histogram(
            "everstep_queue_seconds",
            "Seconds that runs waited before their first job.",
            ("project",),
            buckets=_QUEUE_S,
            registry=registry,
        )
        self.failures = Counter(
            "everstep_failures", "Failures of attempts.", ("project", "verdict"), registry=registry
        )
        self.restarts = Counter(
            "everstep_restarts",
            "Failures after which the run went on.",
            ("project", "verdict"),
            registry=registry,
        )
        self.recovery_s = Histogram(
            "everstep_recovery_seconds",
            "Seconds from noticing a failure to the first step after it.",
            ("project", "verdict"),
            buckets=_RECOVERY_S,
            registry=registry,
        )
        self.detection_s = Histogram(
            "everstep_detection_seconds",
            "Seconds from a failure to its notice.",
            ("project",),
            buckets=_RECOVERY_S,
            registry=registry,
        )
        self.steps_lost = Counter(
            "everstep_steps_lost",
            "Steps that had to be done again.",
            ("project",),
            registry=registry,
        )
        self.steps = Counter(
            "everstep_steps",
            "Steps that were reported, repeated ones too.",
            ("project",),
            registry=registry,
        )
        self.stall_s = Histogram(
            "everstep_checkpoint_stall_seconds",
            "Seconds that training stood still for a checkpoint.",
            ("project",),
            buckets=_STALL_S,
            registry=registry,
        )
        self.write_s = Histogram(
            "everstep_checkpoint_write_seconds",
            "Seconds from the copy to the commit of a checkpoint.",
            ("project",),
            buckets=_WRITE_S,
            registry=registry,
        )
        self.checkpoint_bytes = Counter(
            "everstep_checkpoint_bytes",
            "Bytes of committed checkpoints.",
            ("project",),
            registry=registry,
        )
        self.checkpoints = Counter(
            "everstep_checkpoints", "Saves by result.", ("project", "result"), registry=registry
        )
        self.stragglers = Counter(
            "everstep_stragglers",
            "Ranks that began to hold their peers up.",
            ("project",),
            registry=registry,
        )
        self.share_plans = Counter(
            "everstep_share_plans",
            "Changes of shares that follow the ranks' speed.",
            ("project",),
            registry=registry,
        )
        self.event_lag_s = Histogram(
            "everstep_event_lag_seconds",
            "Seconds from an event on the cluster to its place in the database.",
            buckets=_LAG_S,
            registry=registry,
        )

    def started(self, run: RunRow, waited_s: float) -> None:
        """A run's first job was claimed after it waited so long."""
        self._begin(run.project)
        self.queue_s.labels(run.project).observe(max(0.0, waited_s))

    def applied(self, run: RunRow, events: Sequence[JournalEvent]) -> None:
        """Events of a run's journal are in the database now, for the first time."""
        self._begin(run.project)
        now = self._clock()
        for event in events:
            try:
                self._count(run, event)
            except UNFIT as exc:
                log.warning(
                    "an event was not counted",
                    run_id=run.id,
                    kind=str(event.kind),
                    problem=repr(exc),
                )
        for at in {round(event.at, 1): event.at for event in events}.values():
            self.event_lag_s.observe(max(0.0, now - at))

    def _begin(self, project: str) -> None:
        """Show all that is counted of a project at zero: Prometheus sees no increase in what is
        born with its first count."""
        if project in self._projects:
            return
        self._projects.add(project)
        counters = self.steps_lost, self.steps, self.checkpoint_bytes, self.stragglers
        for counter in (*counters, self.share_plans):
            counter.labels(project)
        for histogram in (self.queue_s, self.detection_s, self.stall_s, self.write_s):
            histogram.labels(project)
        for verdict in Verdict:
            self.failures.labels(project, verdict.value)
            self.restarts.labels(project, verdict.value)
            self.recovery_s.labels(project, verdict.value)
        for result in ("committed", "failed"):
            self.checkpoints.labels(project, result)

    def _count(self, run: RunRow, event: JournalEvent) -> None:
        project, data = run.project, event.data
        match event.kind:
            case EventKind.METRICS:
                self.steps.labels(project).inc(len(data["points"]))
            case EventKind.FAILURE:
                self._failure(run, data)
            case EventKind.RECOVERED:
                verdict = self._last_verdict.pop(run.id, Verdict.UNKNOWN.value)
                _observe(self.recovery_s.labels(project, verdict), data.get("recovery_s"))
                self.steps_lost.labels(project).inc(data.get("steps_lost") or 0)
            case EventKind.CHECKPOINT_COMMITTED:
                self.checkpoints.labels(project, "committed").inc()
                self.checkpoint_bytes.labels(project).inc(data["size_bytes"])
                _observe(self.stall_s.labels(project), data.get("stall_s"))
                _observe(self.write_s.labels(project), data.get("write_s"))
            case EventKind.CHECKPOINT_FAILED:
                self.checkpoints.labels(project, "failed").inc()
            case EventKind.STRAGGLER if data.get("slow"):
                self.stragglers.labels(project).inc()
            case EventKind.SHARES_PLANNED:
                self.share_plans.labels(project).inc()
            case EventKind.FINISHED:
                self._last_verdict.pop(run.id, None)

    def _failure(self, run: RunRow, data: dict[str, Any]) -> None:
        verdict = Verdict(data["verdict"]).value
        self.failures.labels(run.project, verdict).inc()
        if data.get("action") != "stop":
            self.restarts.labels(run.project, verdict).inc()
            self._last_verdict[run.id] = verdict
        _observe(self.detection_s.labels(run.project), data.get("detect_s"))


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None and math.isfinite(seconds) and seconds >= 0:
        histogram.observe(seconds)
