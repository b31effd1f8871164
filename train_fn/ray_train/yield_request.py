"""Ask the ranks of a running group to exit, so that a group of another size or a newer submission
can follow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from train_fn.ray_train.attempt_log import AttemptLog
from train_fn.ray_train.recruits import Recruits
from train_fn.ray_train.scaling import LiveScalingPolicy
from train_fn.ray_train.worker_group import EverstepWorkerGroup
from train_fn.recovery.settings import RecoverySettings

_DRAIN_MARGIN_S = 8.0
"""Seconds before a draining node is removed at which ranks that hold up the others are killed, so
that the others can still exit."""

logger = logging.getLogger(__name__)


class YieldRequest:
    """The request to one group at a time. It is made once, and given up after ``yield_timeout_s``.

    Args:
        settings: the timeout.
        sizes: says whether another size is wanted, and which nodes drain.
        attempt_log: has the size of the group.
        is_leaving: returns whether the run goes on in another submission.
        recruits: for ranks that join the next group; None if its processes are all new.
    """

    def __init__(
        self,
        settings: RecoverySettings,
        sizes: LiveScalingPolicy,
        attempt_log: AttemptLog,
        is_leaving: Callable[[], bool],
        recruits: Recruits | None = None,
    ) -> None:
        self._settings = settings
        self._sizes = sizes
        self._attempt_log = attempt_log
        self._is_leaving = is_leaving
        self._recruits = recruits
        self._since: float | None = None
        """When the pending request was made, in monotonic seconds; None without one."""
        self._overdue_killed = False
        self.asked = False
        """Whether the current group was ever asked. It may still exit after the request was given
        up."""
        self.asked_at = 0.0
        """When it was asked, in Unix seconds."""

    def reset(self) -> None:
        """Begin anew with the next group."""
        self._since = None
        self.asked = self._overdue_killed = False
        if self._recruits is not None:
            self._recruits.end()

    def check(self, group: EverstepWorkerGroup) -> None:
        """Ask the ranks to exit once another size is wanted or the driver is gone. Call this with
        every turn of the control loop."""
        if self._sizes.wanted is None and not self._is_leaving():
            return
        now = time.monotonic()
        if self._since is None:
            if self._is_next_ready():
                self._ask(group, now)
        elif not self._overdue_killed and self._sizes.must_have_left(time.time() + _DRAIN_MARGIN_S):
            self._overdue_killed = True
            ranks = group.abandon(self._sizes.draining)
            logger.warning(
                "a node is about to be removed, and ranks have not exited; killed rank %s", ranks
            )
        elif now - self._since > self._settings.yield_timeout_s and not self._is_leaving():
            logger.warning(
                "ranks did not exit within %g s; keeping the group as it is",
                self._settings.yield_timeout_s,
            )
            self._sizes.wanted = None
            self._since = None

    def _is_next_ready(self) -> bool:
        """Return whether nothing but the ranks' exit is left to wait for."""
        wanted, sizes = self._sizes.wanted, self._sizes
        return (
            self._recruits is None
            or wanted is None
            or self._is_leaving()
            or sizes.must_have_left(time.time() + 2 * _DRAIN_MARGIN_S)
            or self._recruits.are_ready(wanted, sizes.scaling_config, self._attempt_log.attempt)
        )

    def _ask(self, group: EverstepWorkerGroup, now: float) -> None:
        followers = (
            "the next submission" if self._is_leaving() else f"a group of {self._sizes.wanted}"
        )
        hands_over = (
            self._recruits is not None
            and not self._is_leaving()
            and bool(group.ranks_outside(self._sizes.draining))
        )
        logger.info(
            "asking %d ranks to %s for %s",
            self._attempt_log.world_size,
            "hand over" if hands_over else "save and exit",
            followers,
        )
        self._since = now
        self.asked_at = time.time()
        self.asked = True
        group.ask_to_yield(hands_over=hands_over)
