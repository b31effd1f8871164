"""Kill the ranks that hold up a group without progress."""

from __future__ import annotations

import logging
import math
import time

from train_fn.ray_train.attempt_log import AttemptLog
from train_fn.ray_train.worker_group import EverstepWorkerGroup
from train_fn.recovery.hang import HangWatch
from train_fn.recovery.settings import RecoverySettings

logger = logging.getLogger(__name__)


class HangBreaker:
    """Compare the journal's progress with the limits of the current phase.

    Killing only ends the wait. The failure path then judges and restarts.
    """

    def __init__(
        self, settings: RecoverySettings, hang_timeout_s: float | None, attempt_log: AttemptLog
    ) -> None:
        self._settings = settings
        self._hang_timeout_s = hang_timeout_s
        self._attempt_log = attempt_log
        self._watch = self._new_watch()

    @property
    def due_at(self) -> float:
        """Return when the group is overdue without progress until then, in monotonic seconds."""
        return self._watch.due_at

    @property
    def left_s(self) -> float:
        """Return the seconds that the group has until it is overdue; 0 if there is no limit."""
        left_s = self.due_at - time.monotonic()
        return 0.0 if math.isinf(left_s) else max(0.0, left_s)

    @property
    def quiet_s(self) -> float:
        """Return the seconds since the group was last seen to move; 0 before it was."""
        return self._watch.quiet_s(time.monotonic())

    def check(self, group: EverstepWorkerGroup) -> None:
        """Kill the ranks that hold up the others once nothing has moved for too long. Call this
        with every turn of the control loop."""
        progress = self._attempt_log.journal.take_progress()
        if progress is None or progress.attempt != self._attempt_log.attempt:
            return
        overdue_s = self._watch.overdue_s(progress, time.monotonic())
        if overdue_s is None:
            return
        if not group.is_cut_off():
            reason = self._watch.reason(progress, overdue_s)
            ranks = group.break_hang(reason)
            logger.warning("%s; killed rank %s", reason, ranks)
        self._watch = self._new_watch()

    def _new_watch(self) -> HangWatch:
        return HangWatch(self._settings, self._hang_timeout_s)
