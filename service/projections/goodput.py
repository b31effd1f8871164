"""Where a run's wall time went: every microsecond since its creation lies in exactly one bucket.

A ledger is folded event by event and kept with the run's row, so that reading it costs nothing
however long the history is. All arithmetic is in whole microseconds, and time only moves between
buckets, which is why the sum is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from everstep.wire import Goodput, GoodputBuckets, RunStatus, Verdict
from everstep.wire.events import EventKind
from service.model.rows import EventRow

BUCKETS: Final = tuple(GoodputBuckets.model_fields)
_WORKING: Final = ("productive", "rework")
_BUCKET_OF_STATUS: Final = {
    RunStatus.QUEUED.value: "queued",
    RunStatus.STARTING.value: "starting",
    RunStatus.PAUSED.value: "paused",
    RunStatus.SUCCEEDED.value: "idle",
    RunStatus.FAILED.value: "idle",
    RunStatus.CANCELLED.value: "idle",
}


def to_us(seconds: float) -> int:
    """Whole microseconds, the ledger's unit."""
    return round(seconds * 1_000_000)


@dataclass
class TimeLedger:
    """Time up to ``at_us`` is spent; from there on it lies in ``bucket``."""

    created_us: int
    at_us: int
    bucket: str = "queued"
    spent_us: dict[str, int] = field(default_factory=dict)
    progress_us: int = 0
    """When the last step was seen to end, or work began."""
    step: int = 0
    furthest_step: int = 0
    """Steps that were ever done; doing them again is rework."""
    trained: bool = False

    @classmethod
    def begin(cls, created_at: float) -> TimeLedger:
        return cls(created_us=to_us(created_at), at_us=to_us(created_at))

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> TimeLedger:
        return cls(**{**state, "spent_us": dict(state["spent_us"])})

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    def apply(self, event: EventRow, latest: float) -> None:
        """Account for one event.

        Args:
            event: The next event of the run's history.
            latest: Unix seconds that no event may lie beyond: a node's clock that runs ahead must
                not book time that has not been.
        """
        limit_us = to_us(latest)
        if event.kind == EventKind.METRICS:
            for point in event.data["points"]:
                at, step = min(to_us(point["at"]), limit_us), int(point["step"])
                if at <= self.at_us and self.bucket == "restarting":
                    # of the attempt that failed: told late
                    self.furthest_step = max(self.furthest_step, step)
                elif at > self.at_us or step > self.furthest_step:
                    # else it is told once more, after a recovery
                    self._step_done(at, step)
            return
        self._advance(min(to_us(event.at), limit_us))
        data = event.data
        match event.kind:
            case EventKind.STATUS:
                self._status(data["to"])
            case EventKind.WAITING:
                self.bucket = "idle"
            case EventKind.SUBMISSION_STARTED:
                self._interrupted(None)
            case EventKind.ATTEMPT_STARTED if self.bucket == "idle":
                self.bucket = "restarting" if self.trained else "starting"
            case EventKind.RESTORED:
                self.step = int(data["step"])
            case EventKind.TRAINING_STARTED if self.bucket in ("starting", "idle"):
                self._work()
            case EventKind.RECOVERED:
                self._work()
            case EventKind.EPOCH_COMPLETED | EventKind.EVALUATED | EventKind.EPOCH_HOOK_DONE if (
                self.bucket in _WORKING
            ):
                self.progress_us = self.at_us
            case EventKind.CHECKPOINT_COMMITTED:
                self._move(self.bucket, "checkpoint_stall", data.get("stall_s"))
            case EventKind.FAILURE:
                self._interrupted(data.get("detect_s"))
                self.bucket = "restarting"
            case EventKind.ATTEMPT_ENDED:
                self._attempt_ended(data.get("cause"))

    def close(self, end: float) -> Goodput:
        """What the ledger says at ``end`` (unix seconds), without changing it."""
        wall_us = max(to_us(end), self.at_us) - self.created_us
        spent = {name: self.spent_us.get(name, 0) for name in BUCKETS}
        spent[self.bucket] += wall_us - sum(spent.values())
        share = spent["productive"] / wall_us if self.trained and wall_us else None
        return Goodput(
            wall_s=wall_us / 1e6,
            buckets=GoodputBuckets(**{name: us / 1e6 for name, us in spent.items()}),
            goodput=share,
        )

    def share(self, end: float) -> float | None:
        """The share of wall time that trained, as ``close(end)`` says."""
        wall_us = max(to_us(end), self.at_us) - self.created_us
        if not self.trained or not wall_us:
            return None
        spent = self.spent_us.get("productive", 0)
        return (
            spent + (wall_us - sum(self.spent_us.values()) if self.bucket == "productive" else 0)
        ) / wall_us

    def _advance(self, to: int) -> None:
        """Book the time up to ``to``; an event from a clock that is behind books nothing."""
        if to > self.at_us:
            self.spent_us[self.bucket] = self.spent_us.get(self.bucket, 0) + to - self.at_us
            self.at_us = to

    def _move(self, source: str, target: str, amount_s: float | None) -> None:
        """Rebook time that turned out to be something else; never more than there is."""
        if source not in _WORKING or not amount_s or amount_s < 0:
            return
        available = self.spent_us.get(source, 0)
        amount = min(to_us(amount_s), available)
        self.spent_us[source] = available - amount
        self.spent_us[target] = self.spent_us.get(target, 0) + amount

    def _work(self) -> None:
        self.bucket = "rework" if self.step < self.furthest_step else "productive"
        self.progress_us = self.at_us
        self.trained = True

    def _step_done(self, at: int, step: int) -> None:
        self._advance(at)
        self.step = step
        self.furthest_step = max(self.furthest_step, step)
        self._work()

    def _interrupted(self, detect_s: float | None) -> None:
        """Work stopped some time ago, unnoticed: as long as the driver says, or since the last
        step.

        No time since the last step was work, whatever the driver says: what is left of it went into
        the restart.
        """
        if self.bucket not in _WORKING:
            return
        idle_s = (self.at_us - self.progress_us) / 1e6
        unnoticed_s = idle_s if detect_s is None else max(0.0, detect_s)
        self._move(self.bucket, "detecting", unnoticed_s)
        self._move(self.bucket, "restarting", idle_s - unnoticed_s)
        self.bucket = "restarting"

    def _attempt_ended(self, cause: str | None) -> None:
        if cause in set(Verdict):
            self._interrupted(None)
            self.bucket = "restarting"
        elif cause == "resized":
            self.bucket = "restarting"
        elif self.bucket in _WORKING:
            self.bucket = "idle"

    def _status(self, status: str) -> None:
        if status == RunStatus.RECOVERING:
            self._interrupted(None)
        self.bucket = _BUCKET_OF_STATUS.get(status, self.bucket)


def goodput(created_at: float, events: Iterable[EventRow], end: float) -> Goodput:
    """Buckets of a whole history: the ledger folded from its first event. Times are unix
    seconds."""
    ledger = TimeLedger.begin(created_at)
    for event in events:
        ledger.apply(event, latest=end)
    return ledger.close(end)
