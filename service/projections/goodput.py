"""Account for a run's wall time: every microsecond since its creation is in exactly one bucket.

The ledger is updated with every event and stored in the run's row, so that reading it is cheap
however long the history is. The sum is exact because all arithmetic is in whole microseconds and
time only moves between buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from everstep.spec.sections import ScalingSpec
from everstep.wire import FirstStart, Goodput, GoodputBuckets, RunStatus, Verdict
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


_ENDS_PART: Final[dict[str, str]] = {
    EventKind.SUBMISSION_STARTED: "job_s",
    EventKind.ATTEMPT_STARTED: "ranks_s",
    EventKind.RESTORED: "model_s",
    EventKind.TRAINING_STARTED: "data_s",
    EventKind.METRICS: "step_s",
}
"""Kind of an event -> the part of the first start that it ends."""


def to_us(seconds: float) -> int:
    """Return whole microseconds, the ledger's unit."""
    return round(seconds * 1_000_000)


@dataclass
class TimeLedger:
    """Wall time by bucket. Time up to ``at_us`` is booked; later time belongs to ``bucket``."""

    created_us: int
    at_us: int
    bucket: str = "queued"
    spent_us: dict[str, int] = field(default_factory=dict)
    progress_us: int = 0
    """When the last step ended, or work began."""
    step: int = 0
    furthest_step: int = 0
    """Most steps ever done; repeating them is rework."""
    trained: bool = False
    marks_us: dict[str, int] = field(default_factory=dict)
    """When each part of the first start ended."""
    failed_attempt: int = 0
    """Newest attempt that failed. What it tells afterwards is no work."""

    @classmethod
    def begin(cls, created_at: float) -> TimeLedger:
        return cls(created_us=to_us(created_at), at_us=to_us(created_at))

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> TimeLedger:
        own = {name: dict(state[name]) for name in ("spent_us", "marks_us")}
        return cls(**{**state, **own})

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    def apply(self, event: EventRow, latest: float, *, is_own_loop: bool = False) -> None:
        """Account for one event.

        Args:
            event: The next event of the run's history.
            latest: Unix seconds; later events count at this time. A node's clock that is ahead must
                not book future time.
            is_own_loop: Whether the run calls a user's function or script. What such a loop does
                between two of its reports is not known.
        """
        limit_us = to_us(latest)
        self._mark(event, limit_us)
        if event.kind == EventKind.METRICS:
            for point in event.data["points"]:
                at, step = min(to_us(point["at"]), limit_us), int(point["step"])
                if at <= self.at_us and self.bucket == "restarting":
                    # a late report of the failed attempt
                    self.furthest_step = max(self.furthest_step, step)
                elif at > self.at_us or step > self.furthest_step:
                    # otherwise it is reported again, after a recovery
                    self._step_done(at, step)
            return
        self._advance(min(to_us(event.at), limit_us))
        data = event.data
        match event.kind:
            case EventKind.STATUS:
                self._status(data["to"], is_own_loop)
            case EventKind.WAITING:
                self.bucket = "idle"
            case EventKind.SUBMISSION_STARTED:
                self._interrupted(None, is_own_loop)
            case EventKind.ATTEMPT_STARTED if self.bucket == "idle":
                self.bucket = "restarting" if self.trained else "starting"
            case EventKind.RESTORED:
                self.step = int(data["step"])
            case EventKind.TRAINING_STARTED if self.bucket in ("starting", "idle"):
                self._work()
            case EventKind.RECOVERED if event.attempt > self.failed_attempt:
                self._work()
            case EventKind.EPOCH_COMPLETED | EventKind.EVALUATED | EventKind.EPOCH_HOOK_DONE if (
                self.bucket in _WORKING
            ):
                self.progress_us = self.at_us
            case EventKind.CHECKPOINT_COMMITTED:
                self._move(self.bucket, "checkpoint_stall", data.get("stall_s"))
            case EventKind.FAILURE:
                self.failed_attempt = max(self.failed_attempt, event.attempt)
                self._interrupted(data.get("detect_s"), is_own_loop)
                self.bucket = "restarting"
            case EventKind.ATTEMPT_ENDED:
                self._attempt_ended(data.get("cause"), is_own_loop)

    def close(self, end: float) -> Goodput:
        """Return the goodput at ``end`` (unix seconds) without changing the ledger."""
        wall_us = max(to_us(end), self.at_us) - self.created_us
        spent = {name: self.spent_us.get(name, 0) for name in BUCKETS}
        spent[self.bucket] += wall_us - sum(spent.values())
        share = spent["productive"] / wall_us if self.trained and wall_us else None
        return Goodput(
            wall_s=wall_us / 1e6,
            buckets=GoodputBuckets(**{name: us / 1e6 for name, us in spent.items()}),
            goodput=share,
            first_start=self._first_start(),
        )

    def _mark(self, event: EventRow, limit_us: int) -> None:
        """Record the end of a part of the first start. A part that was skipped stays unknown."""
        part = _ENDS_PART.get(event.kind)
        if event.kind == EventKind.STATUS and event.data["to"] == RunStatus.STARTING:
            part = "queued_s"
        marks = self.marks_us
        if part is None or "step_s" in marks or part in marks:
            return
        points = event.data["points"] if event.kind == EventKind.METRICS else ()
        at_us = to_us(points[0]["at"] if points else event.at)
        marks[part] = min(at_us, limit_us)

    def _first_start(self) -> FirstStart:
        parts, before_us = {}, self.created_us
        for part in FirstStart.model_fields:
            if part in self.marks_us:
                at_us = max(before_us, self.marks_us[part])
                parts[part] = (at_us - before_us) / 1e6
                before_us = at_us
        return FirstStart(**parts)

    def share(self, end: float) -> float | None:
        """Return the productive share of wall time, equal to that of ``close(end)``."""
        wall_us = max(to_us(end), self.at_us) - self.created_us
        if not self.trained or not wall_us:
            return None
        spent = self.spent_us.get("productive", 0)
        return (
            spent + (wall_us - sum(self.spent_us.values()) if self.bucket == "productive" else 0)
        ) / wall_us

    def _advance(self, to: int) -> None:
        """Book the time up to ``to``; earlier times book nothing."""
        if to > self.at_us:
            self.spent_us[self.bucket] = self.spent_us.get(self.bucket, 0) + to - self.at_us
            self.at_us = to

    def _move(self, source: str, target: str, amount_s: float | None) -> None:
        """Move booked time to another bucket, at most as much as there is."""
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

    def _interrupted(self, detect_s: float | None, is_own_loop: bool) -> None:
        """Book that work stopped before now: for as long as the driver says, else since the last
        step.

        In Everstep's loop none of the time since the last step was work, and what exceeds the
        detection time belongs to the restart. A user's own loop worked until the failure.
        """
        if self.bucket not in _WORKING:
            return
        since_step_s = (self.at_us - self.progress_us) / 1e6
        if detect_s is not None:
            unnoticed_s = max(0.0, detect_s)
        else:
            unnoticed_s = 0.0 if is_own_loop else since_step_s
        self._move(self.bucket, "detecting", unnoticed_s)
        rest = "unreported" if is_own_loop else "restarting"
        self._move(self.bucket, rest, since_step_s - unnoticed_s)
        self.bucket = "restarting"

    def _attempt_ended(self, cause: str | None, is_own_loop: bool) -> None:
        if cause in set(Verdict):
            self._interrupted(None, is_own_loop)
            self.bucket = "restarting"
        elif cause in ("resized", EventKind.FELL_BACK):
            self.bucket = "restarting"
        elif self.bucket in _WORKING:
            self.bucket = "idle"

    def _status(self, status: str, is_own_loop: bool) -> None:
        if status == RunStatus.RECOVERING:
            self._interrupted(None, is_own_loop)
        self.bucket = _BUCKET_OF_STATUS.get(status, self.bucket)


# ---------------------------------------------------------------- work

# How fast a run trains, and which resources it has held: folded from its events like the time.
#
# The ledger is stored in the run's row. Time is in whole microseconds.

_RECENT_S: Final = 60.0
"""Steps older than this have lost most of their weight in the pace."""
_SILENCE_S: Final = 10.0
"""Seconds without a step from which on the pace falls."""
_HOLDING: Final = frozenset({RunStatus.STARTING, RunStatus.RUNNING, RunStatus.STOPPING})
"""Statuses in which ranks hold resources, from the start of an attempt."""


@dataclass
class WorkLedger:
    """Pace and resources up to ``at_us``. Later time is held by ``ranks`` ranks."""

    cpus_per_rank: float
    gpus_per_rank: float
    """GPUs of a rank that trains on a GPU."""
    at_us: int
    ranks: int = 0
    on_gpu: bool = False
    """Whether the ranks of the newest attempt that trained were on GPUs."""
    held_us: int = 0
    """Time of all ranks of the current attempt together."""
    rank_us: int = 0
    """The same of earlier attempts."""
    gpu_rank_us: int = 0
    """The part of ``rank_us`` on GPUs."""
    step: int | None = None
    """Last step of this attempt."""
    step_at_us: int = 0
    recent_steps: float = 0.0
    recent_s: float = 0.0
    """Steps of this attempt and their time, with weights that fall with age."""

    @classmethod
    def begin(cls, scaling: ScalingSpec, created_at: float) -> Self:
        resources = scaling.resources_per_worker
        return cls(
            cpus_per_rank=resources.get("CPU", 0.0),
            gpus_per_rank=resources.get("GPU", 1.0),
            at_us=to_us(created_at),
            on_gpu=scaling.use_gpu is True or "GPU" in resources,
        )

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Self:
        """Return the stored ledger. Fields of newer versions are ignored."""
        return cls(**{name: state[name] for name in cls.__dataclass_fields__ if name in state})

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    def apply(self, event: EventRow, latest: float) -> None:
        """Account for the next event of the run's history. Later times count as ``latest``."""
        data = event.data
        if event.kind == EventKind.METRICS:
            for point in data["points"]:
                self._step_done(min(to_us(point["at"]), to_us(latest)), int(point["step"]))
            return
        self._advance(min(to_us(event.at), to_us(latest)))
        match event.kind:
            case EventKind.ATTEMPT_STARTED:
                self._release()
                self.ranks = int(data["world_size"])
            case EventKind.TRAINING_STARTED if data.get("device"):
                self.on_gpu = str(data["device"]).startswith("cuda")
            case EventKind.ATTEMPT_ENDED | EventKind.SUBMISSION_STARTED | EventKind.FINISHED:
                self._release()
            case EventKind.STATUS if data["to"] not in _HOLDING:
                self._release()

    def steps_per_s(self, now: float) -> float | None:
        """Return the pace of the current attempt; None before its second step.

        It falls while no step is reported.
        """
        if not self.recent_s or not self.recent_steps:
            return None
        pace = self.recent_steps / self.recent_s
        silent_s = now - self.step_at_us / 1e6
        return pace if silent_s <= _SILENCE_S else min(pace, 1 / silent_s)

    def hours(self, now: float) -> tuple[float, float]:
        """Return the GPU hours and CPU hours that all attempts have held until ``now``."""
        held_us = self.held_us + self.ranks * max(0, to_us(now) - self.at_us)
        gpu_rank_us = self.gpu_rank_us + (held_us if self.on_gpu else 0)
        hour_us = 3.6e9
        return (
            gpu_rank_us * self.gpus_per_rank / hour_us,
            (self.rank_us + held_us) * self.cpus_per_rank / hour_us,
        )

    def _advance(self, to: int) -> None:
        if to > self.at_us:
            self.held_us += self.ranks * (to - self.at_us)
            self.at_us = to

    def _release(self) -> None:
        """End the current attempt: its ranks hold nothing from here on."""
        self.rank_us += self.held_us
        if self.on_gpu:
            self.gpu_rank_us += self.held_us
        self.held_us = self.ranks = 0
        self.step, self.recent_steps, self.recent_s = None, 0.0, 0.0

    def _step_done(self, at: int, step: int) -> None:
        self._advance(at)
        if self.step is not None and step > self.step and at > self.step_at_us:
            seconds = (at - self.step_at_us) / 1e6
            weight = math.exp(-seconds / _RECENT_S)
            self.recent_steps = self.recent_steps * weight + step - self.step
            self.recent_s = self.recent_s * weight + seconds
        if self.step is None or step > self.step:
            self.step, self.step_at_us = step, at
