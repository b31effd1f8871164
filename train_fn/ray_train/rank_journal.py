"""The journal as the loop of a rank sees it under Ray: with the controller's request to exit, and
with the report of a recovery."""

from __future__ import annotations

import time
from typing import Any

from everstep.wire.events import OWN_FILES, EventKind, Rung
from storage.run_control import DrillOrder, ProfileOrder, Stop
from storage.run_names import CheckpointName
from train_fn import clock as head_clock
from train_fn.journal.client import ActorJournalClient
from train_fn.ray_train import rank_process
from train_fn.recovery.launch import RankLaunch

_IN_MEMORY = frozenset({"process", "snapshot"})
"""Sources of a state that survivors of the failure left."""


class RankJournal:
    """Pass a rank's events to its journal client. On rank 0 of an attempt that follows a failure,
    add the recovery's report after the first step.

    Args:
        client: delivers events.
        launch: has the failure that the attempt recovers from.
        world_rank: this rank.
        world_size: size of the group.
        runs_script: whether the rank runs a user's script, which may report nothing.
    """

    def __init__(
        self,
        client: ActorJournalClient,
        launch: RankLaunch,
        world_rank: int,
        world_size: int,
        *,
        runs_script: bool = False,
    ) -> None:
        self._client = client
        self._launch = launch
        self._world_size = world_size
        self._recovering = launch.recovery is not None and world_rank == 0
        self._entered = self._restored = time.monotonic()
        self._restored_step: int | None = None
        self._rejected_step = 0
        self._source: str | None = None
        """Where the state was restored from."""
        self._unit: str | None = None
        """What a step of the run is, if it is no optimizer step."""
        self._from_own_files = False
        """Whether a script continues from its own files, at a step that nobody knows."""
        # A script that has reported before ends its recovery like others, with its next report.
        self._reports_nothing = (
            runs_script and launch.recovery is not None and not launch.recovery.last_step
        )

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Queue an event. Never blocks."""
        was_recovering = self._recovering
        if was_recovering:
            self._note(kind, data)
        self._client.emit(kind, data)
        if was_recovering and not self._recovering:
            self._client.flush(0.0)  # this rank may be the next one to die
        if kind is EventKind.TRAINING_STARTED and self._recovering and self._reports_nothing:
            self._recovering = False
            self._client.emit(EventKind.RECOVERED, self._recovered(head_clock.now()))

    @property
    def stop_requested(self) -> Stop | None:
        """Return the user's stop request. A request to exit from the controller looks like a pause,
        so that the loop saves and exits. ``run_rank`` tells them apart."""
        return self._client.stop_requested or ("pause" if rank_process.yield_asked() else None)

    def hands_over(self) -> bool:
        """Return whether the controller has asked for the exit, for a group in which processes of
        this one go on, and the user for none."""
        return self._client.stop_requested is None and rank_process.hands_over()

    def profile_ordered(self) -> ProfileOrder | None:
        """Return the newest profile that was requested."""
        return self._client.profile_ordered

    def flip_ordered(self) -> DrillOrder | None:
        """Return the newest drill that flips a bit in a rank."""
        return self._client.flip_ordered

    def flush(self, timeout_s: float) -> bool:
        """Wait until all events are durable. Return False after the timeout."""
        return self._client.flush(timeout_s)

    def holds_lease(self, timeout_s: float) -> bool:
        """Return whether the journal has lately confirmed that this attempt is the newest."""
        return self._client.holds_lease(timeout_s)

    def journaled_step(self) -> float:
        """Return the newest step whose metrics the journal has."""
        return self._client.told_step or 0

    def _note(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Note the restored step, then report the recovery with the first new step."""
        if kind is EventKind.RESTORED:
            self._restored = time.monotonic()
            self._restored_step = data.get("step")
            self._source = data.get("source")
            self._unit = data.get("unit")
            self._from_own_files = data.get("source") == OWN_FILES
            self._rejected_step = _rejected_step(data, self._launch.attempt - 1)
        if kind is EventKind.METRICS and data["points"]:
            self._recovering = False
            self._client.emit(EventKind.RECOVERED, self._recovered(self._first_at(data["points"])))

    def _first_at(self, points: list[dict[str, Any]]) -> float:
        """Return when the attempt's first step ended, in Unix seconds. Steps from before the
        failure may come along with it."""
        done = self._restored_step if isinstance(self._restored_step, int) else 0
        first = next((point for point in points if point["step"] > done), points[0])
        return float(first["at"])

    def _recovered(self, first_step_at: float) -> dict[str, Any]:
        """Return the recovery's duration by phase, and the lost steps, given the time of the first
        step in Unix seconds."""
        note = self._launch.recovery
        assert note is not None
        entered_at, restored_at = (
            head_clock.time_of(self._entered),
            head_clock.time_of(self._restored),
        )
        # If no step was left to do, the reported step is from before the failure.
        first_step_at = max(first_step_at, restored_at)
        lost = None
        if self._restored_step is not None and not self._from_own_files:
            # No known last step means that no step was reported.
            done = max(note.last_step or 0, self._rejected_step)
            lost = max(0, done - self._restored_step)
        of_reports = {"unit": self._unit, "since_report_s": note.since_step_s}
        return {
            **(of_reports if self._unit is not None else {}),
            "detect_s": note.detect_s,
            "recovery_s": round(first_step_at - note.noticed_at, 3),
            "steps_lost": lost,
            "world_size_before": note.world_size_before,
            "world_size_after": self._world_size,
            "rung": self._rung(),
            "phases": {
                "leave": round(note.left_at - note.noticed_at, 3),
                "decide": round(self._launch.started_at - note.left_at, 3),
                "start": round(entered_at - self._launch.started_at, 3),
                "restore": round(restored_at - entered_at, 3),
                "first_step": round(first_step_at - restored_at, 3),
            },
        }

    def _rung(self) -> str | None:
        """Return the rung that served the recovery; None if the run began anew, or if a user's own
        loop restores its state."""
        if self._launch.num_stayed and self._source in _IN_MEMORY:
            return Rung.IN_PROCESS.value
        return self._source if self._source in set(Rung) else None


def _rejected_step(restored: dict[str, Any], attempt: int) -> int:
    """Return the highest step of the checkpoints that ``attempt`` wrote and a restore rejected.

    The ranks may have died before their journal could report those steps. Checkpoints of other
    attempts do not count: their steps were lost before.
    """
    names = [CheckpointName.parse(str(each["name"])) for each in restored.get("rejected") or ()]
    return max((name.step for name in names if name and name.attempt == attempt), default=0)
