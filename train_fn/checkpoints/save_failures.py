"""Saves that fail: when the next one is tried, and when so many failed that the storage counts as
unavailable."""

from __future__ import annotations

from everstep.spec.sections import CheckpointSpec
from storage.run_control import Stop

RETRY_S = 1.0
"""Pause after the first failure; each further one doubles it."""
RETRY_MAX_S = 60.0
STALLED_S = 60.0
"""A save of which the storage took no byte for so long counts as failed, again and again while that
lasts."""


class SaveFailures:
    """Counts failures in a row. Seconds by a clock that only rises. Not thread-safe."""

    def __init__(self, spec: CheckpointSpec) -> None:
        self._spec = spec
        self._retry_at = float("-inf")
        self.in_a_row = 0
        self.stop: Stop | None = None
        """``pause`` where the run asked for it and the storage is unavailable."""

    @property
    def retry_s(self) -> float:
        """Pause that the last failure asks for."""
        return (
            min(RETRY_MAX_S, RETRY_S * 2.0 ** min(self.in_a_row - 1, 16)) if self.in_a_row else 0.0
        )

    def failed(self, now: float) -> None:
        self.in_a_row += 1
        if self.in_a_row >= self._spec.max_failed_saves and self._spec.on_failed_saves == "pause":
            self.stop = "pause"
        self._retry_at = now + self.retry_s

    def succeeded(self) -> None:
        self.in_a_row, self._retry_at, self.stop = 0, float("-inf"), None

    def may_try(self, now: float) -> bool:
        """Whether the pause after the last failure is over."""
        return now >= self._retry_at
