"""Decide after failed saves when to retry, and when the storage counts as unavailable."""

from __future__ import annotations

from typing import Any

from everstep.spec.sections import CheckpointSpec
from storage.run_control import Stop

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
