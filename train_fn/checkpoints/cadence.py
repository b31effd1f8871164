"""Decide when the next checkpoint is due: by steps, by time, or from the cost of a save and the
risk of a failure.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from everstep.spec.sections import CheckpointSpec
from everstep.wire import Verdict
from everstep.wire.events import EventKind
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.retention import reported_checkpoints
from storage.errors import StorageError
from storage.logs.journal import journal_events
from storage.run_control import Stop
from storage.run_dir import CheckpointName, RunDir
from train_fn import clock as head_clock
from train_fn.context import WorkerContext

STEPS_KEPT = 64
"""Steps whose seconds are compared to estimate how much background writing slows them."""
NEWS_RATIO = 1.25
"""An interval that changes by at least this factor is reported."""


@dataclass(frozen=True)
class Interval:
    """Hold an interval that ``auto`` chose, and its reasons. All times are in seconds."""

    interval_s: float
    cost_s: float
    """Training time that a save costs: the copy between two steps, and the slowdown of the steps
    during the write."""
    write_s: float
    mtbf_s: float
    source: Literal["given", "observed"]
    num_failures: int
    bound: Literal["write", "min_interval_s", "max_interval_s"] | None
    """The limit that replaced the formula's result; None if none did."""

    def reason(self) -> str:
        """Return the reason for the choice as text."""
        risk = (
            "as given"
            if self.source == "given"
            else f"estimated after {self.num_failures} failures"
        )
        text = (
            f"a save costs {self.cost_s:.3g} s of training and a failure comes every "
            f"{self.mtbf_s:.3g} s ({risk}): "
            f"the least is lost with a checkpoint every {self.interval_s:.3g} s"
        )
        cut = {
            "write": f"; no sooner, because writing takes {self.write_s:.3g} s",
            "min_interval_s": "; no sooner, because of checkpoint.min_interval_s",
            "max_interval_s": "; no later, because of checkpoint.max_interval_s",
        }
        return text + (cut[self.bound] if self.bound else "")


def young_daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between two saves that minimise the time lost to saving and to
    work that a failure undoes.

    Daly's higher-order refinement of Young's ``sqrt(2 * cost * mtbf)`` (J. T. Daly, 2006, equation
    37).
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def choose_interval(
    spec: CheckpointSpec, cost_s: float, write_s: float, observed: ObservedFailures
) -> Interval:
    """Return the interval for ``checkpoint.every_steps: auto``, within the limits of the spec and
    of the storage's write time."""
    mtbf_s = spec.mtbf_s if spec.mtbf_s is not None else observed.mtbf_s()
    interval_s = young_daly_s(cost_s, mtbf_s)
    bound: Literal["write", "min_interval_s", "max_interval_s"] | None = None
    if interval_s < write_s:
        interval_s, bound = write_s, "write"
    if interval_s > spec.max_interval_s:
        interval_s, bound = spec.max_interval_s, "max_interval_s"
    if interval_s < spec.min_interval_s:
        interval_s, bound = spec.min_interval_s, "min_interval_s"
    source: Literal["given", "observed"] = "given" if spec.mtbf_s is not None else "observed"
    return Interval(interval_s, cost_s, write_s, mtbf_s, source, observed.num_failures, bound)


class SaveCadence:
    """Decide on rank 0 when periodic checkpoints are due. Times are seconds on a monotonic clock.
    Not thread-safe."""

    def __init__(self, spec: CheckpointSpec, step: int, now: float) -> None:
        self._spec = spec
        self._saved_step, self._saved_at = step, now
        self.earliest_step = self._earliest_step()
        """No save is due before this step, at any time."""
        self._interval: Interval | None = None
        self._reported_s: float | None = None
        self._quiet_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._busy_s: list[float] = []
        self._just_begun = False
        self._slowdown_s = 0.0
        self._step_ended_at: float | None = None

    @property
    def auto(self) -> bool:
        return self._spec.every_steps == "auto"

    def is_due(self, step: int, now: float) -> bool:
        """Return whether to save the state after ``step``. A save that became due while it was not
        possible stays due."""
        if step < self.earliest_step:
            return False
        every_steps, every_s, passed_s = (
            self._spec.every_steps,
            self._spec.every_s,
            now - self._saved_at,
        )
        if isinstance(every_steps, int) and step // every_steps > self._saved_step // every_steps:
            return True
        if every_s is not None and passed_s >= every_s:
            return True
        # The first save comes early, since the cost of a save is not known before it.
        return self.auto and passed_s >= (
            self._interval.interval_s if self._interval else self._spec.min_interval_s
        )

    def begun(self, step: int, now: float) -> None:
        """Note that a save of ``step`` has started, due or not."""
        self._saved_step, self._saved_at = step, now
        self.earliest_step = self._earliest_step()
        self._slowdown_s, self._busy_s, self._just_begun = self._measure_slowdown_s(), [], True

    def step_ended(self, now: float, *, busy: bool) -> None:
        """Note the end of a step; ``busy`` if a save was being written during it. Called at every
        step boundary, for ``auto`` only."""
        before, self._step_ended_at = self._step_ended_at, now
        busy, self._just_begun = busy or self._just_begun, False
        if before is not None:
            (self._busy_s if busy else self._quiet_s).append(now - before)

    def boundary_left(self, now: float) -> None:
        """Note the start of the next step, so that work at the boundary does not count for it."""
        self._step_ended_at = now

    def committed(
        self, stall_s: float, write_s: float, observed: ObservedFailures
    ) -> dict[str, Any] | None:
        """Choose the interval again after a save. Return the data of an event if it changed enough,
        else None. For ``auto`` only."""
        slowdown_s = self._slowdown_s
        chosen = self._interval = choose_interval(
            self._spec, stall_s + slowdown_s, write_s, observed
        )
        before = self._reported_s
        if before is not None and 1 / NEWS_RATIO < chosen.interval_s / before < NEWS_RATIO:
            return None
        self._reported_s = chosen.interval_s
        return {
            "interval_s": round(chosen.interval_s, 3),
            "cost_s": round(chosen.cost_s, 6),
            "stall_s": round(stall_s, 6),
            "slowdown_s": round(slowdown_s, 6),
            "write_s": round(write_s, 6),
            "mtbf_s": round(chosen.mtbf_s, 3),
            "mtbf_source": chosen.source,
            "num_failures": chosen.num_failures,
            "bound": chosen.bound,
            "reason": chosen.reason(),
        }

    def _earliest_step(self) -> int:
        every_steps = self._spec.every_steps
        if not isinstance(every_steps, int) or self._spec.every_s is not None:
            return self._saved_step + 1
        return (self._saved_step // every_steps + 1) * every_steps

    def _measure_slowdown_s(self) -> float:
        """Return the seconds by which the last save slowed the steps during its write. Medians are
        compared, so that an evaluation between two steps does not count as a slow step."""
        if not self._busy_s or len(self._quiet_s) < 2:
            return 0.0
        return max(0.0, statistics.median(self._busy_s) - statistics.median(self._quiet_s)) * len(
            self._busy_s
        )


# ---------------------------------------------------------------- save events

# Report a run's saves to the journal, including those whose rank died before it could report
# them.


def committed_data(
    manifest: Manifest, stall_s: float = 0.0, write_s: float = 0.0
) -> dict[str, Any]:
    """Return the data of the event that reports a committed checkpoint."""
    return {
        "step": manifest.step,
        "epoch": manifest.epoch,
        "name": manifest.name,
        "size_bytes": manifest.size_bytes,
        "digest": manifest.digest,
        "metrics": manifest.metrics,
        "stall_s": round(stall_s, 6),
        "write_s": round(write_s, 6),
    }


class SaveEvents:
    """Report saves on rank 0, the rank that saves. The saver's threads call this."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._has_caught_up = (ctx.submission, ctx.attempt) == (1, 1)

    def committed(self, manifest: Manifest, stall_s: float = 0.0, write_s: float = 0.0) -> None:
        """Report a committed checkpoint. ``stall_s`` is the time for which the copy blocked
        training, ``write_s`` that of the write, both in seconds."""
        self._ctx.journal.emit(
            EventKind.CHECKPOINT_COMMITTED, committed_data(manifest, stall_s, write_s)
        )

    def deleted(self, names: Sequence[str]) -> None:
        """Report checkpoints that were deleted."""
        for name in names:
            parsed = CheckpointName.parse(name)
            assert parsed is not None
            self._ctx.journal.emit(
                EventKind.CHECKPOINT_DELETED, {"step": parsed.step, "name": name}
            )

    def failed(self, step: int, error: str, failures: dict[str, Any]) -> None:
        """Report a save that failed, with ``SaveFailures.facts``."""
        self._ctx.journal.emit(
            EventKind.CHECKPOINT_FAILED, {"step": step, "error": error, **failures}
        )

    def cadence(self, step: int, chosen: dict[str, Any]) -> None:
        """Report an interval that ``every_steps: auto`` chose."""
        self._ctx.journal.emit(EventKind.CHECKPOINT_CADENCE, {"step": step, **chosen})

    def catch_up(self) -> None:
        """Report, once in an attempt, checkpoints that earlier attempts committed or deleted but
        did not report. Their rank may have died first.

        Call this before this attempt saves. Raise StorageError if journals or checkpoints cannot be
        read; the next call tries again.
        """
        if self._has_caught_up:
            return
        store, reported = self._ctx.checkpoints, reported_checkpoints(self._ctx.run_dir)
        for manifest in store.lineage():
            if CheckpointName.parse(manifest.name) not in reported:
                self.committed(manifest)
        self.deleted(store.missing(reported))
        self._has_caught_up = True


# ---------------------------------------------------------------- save failures

# Decide after failed saves when to retry, and when the storage counts as unavailable.

RETRY_S = 1.0
"""Pause in seconds after the first failure. Each further one doubles it."""
RETRY_MAX_S = 60.0


class SaveFailures:
    """Count consecutive failures. Times are seconds on a monotonic clock. Not thread-safe."""

    def __init__(self, spec: CheckpointSpec) -> None:
        self._spec = spec
        self._retry_at = float("-inf")
        self.in_a_row = 0
        self.stop: Stop | None = None
        """``pause`` if the spec asks for it and the storage counts as unavailable."""

    @property
    def retry_s(self) -> float:
        """Return the pause in seconds after the last failure."""
        return (
            min(RETRY_MAX_S, RETRY_S * 2.0 ** min(self.in_a_row - 1, 16)) if self.in_a_row else 0.0
        )

    def facts(self) -> dict[str, Any]:
        """Return the count of failures, its limit, and the pause, for an event."""
        return {
            "failed_in_a_row": self.in_a_row,
            "max_failed_saves": self._spec.max_failed_saves,
            "retry_s": self.retry_s,
        }

    def failed(self, now: float) -> None:
        self.in_a_row += 1
        if self.in_a_row >= self._spec.max_failed_saves and self._spec.on_failed_saves == "pause":
            self.stop = "pause"
        self._retry_at = now + self.retry_s

    def succeeded(self) -> None:
        self.in_a_row, self._retry_at, self.stop = 0, float("-inf"), None

    def may_try(self, now: float) -> bool:
        """Return whether the pause after the last failure is over."""
        return now >= self._retry_at


# ---------------------------------------------------------------- past failures

# Read from a run's journals how often it failed, to estimate the time between failures.

ASSUMED_MTBF_S = 24 * 3600.0
"""Mean seconds between failures that are assumed before the first one. It weighs as much as one
observed failure."""

NO_RISK = frozenset({Verdict.USER_ERROR.value, Verdict.PREEMPTION.value})
"""Failures that more frequent checkpoints do not help against: code that raises again, and moves
to other nodes, which save first."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObservedFailures:
    """Hold a run's failures and training time so far."""

    num_failures: int = 0
    trained_s: float = 0.0
    """Seconds in which a worker group existed, over all attempts."""

    def mtbf_s(self) -> float:
        """Return the estimated mean seconds between failures: those observed, together with one
        failure in ASSUMED_MTBF_S."""
        return (self.trained_s + ASSUMED_MTBF_S) / (self.num_failures + 1)


def observed_failures(run_dir: RunDir, now: float) -> ObservedFailures:
    """Return the failures and seconds of training in the run's journals. ``now`` is Unix time in
    seconds. Raise StorageError if they cannot be read."""
    num_failures, trained_s, began = 0, 0.0, None
    for event in journal_events(run_dir):
        if event.kind is EventKind.ATTEMPT_STARTED:
            began = event.at
        elif event.kind in (EventKind.ATTEMPT_ENDED, EventKind.FAILURE) and began is not None:
            trained_s, began = trained_s + max(0.0, event.at - began), None
        if event.kind is EventKind.FAILURE and event.data.get("verdict") not in NO_RISK:
            num_failures += 1
    if began is not None:
        trained_s += max(0.0, now - began)
    return ObservedFailures(num_failures, trained_s)


class PastFailures:
    """Return a run's failures and training time until now, and read the journals only once: the
    present attempt has had no failure yet."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._read: tuple[float, ObservedFailures] | None = None

    def observed(self) -> ObservedFailures:
        """Return the failures so far; none if the journals cannot be read. The next call then tries
        again."""
        now = head_clock.now()
        if self._read is None:
            try:
                self._read = (now, observed_failures(self._run_dir, now))
            except StorageError as exc:
                logger.warning(
                    "cannot read the run's failures from its journals; the next save tries again: "
                    "%s",
                    exc,
                )
                return ObservedFailures()
        at, past = self._read
        return replace(past, trained_s=past.trained_s + now - at)
