"""Report what the ranks of a running group do: when somebody asks, and by itself once nothing has
moved for a while."""

from __future__ import annotations

import logging
from typing import Any

from everstep.wire.events import EventKind
from train_fn.ray_train.attempt_log import AttemptLog
from train_fn.ray_train.hung_ranks import answers
from train_fn.ray_train.rank_process import TRAINING_THREAD
from train_fn.recovery import waiting

logger = logging.getLogger(__name__)


class StackReports:
    """Read every rank's stacks and write them to the journal.

    Args:
        after_s: seconds without progress after which it does so by itself; 0 for never.
    """

    def __init__(self, attempt_log: AttemptLog, after_s: float) -> None:
        self._log, self._after_s = attempt_log, after_s
        self._attempt = 0
        self._last_s: float | None = None
        """Seconds without progress at the newest report of this attempt that nobody asked for."""
        self._answered: str | None = None
        """Id of the newest request that was carried out."""

    def check(self, group: Any, quiet_s: float) -> None:
        """Report if somebody asks, or if nothing has moved for ``quiet_s`` seconds and that is
        longer than at the last report. Call this with every turn of the control loop."""
        if self._attempt != self._log.attempt:
            self._attempt, self._last_s = self._log.attempt, None
        order = self._log.journal.stacks_ordered
        if order is not None and order.id != self._answered:
            self._answered = order.id
            if order.attempt == self._attempt:
                self._report(group, quiet_s, order.id)
        elif self._after_s and quiet_s >= waiting.due_after(self._last_s, self._after_s):
            self._last_s = quiet_s
            self._report(group, quiet_s, None)

    def _report(self, group: Any, quiet_s: float, order_id: str | None) -> None:
        workers = group.get_workers()
        stacks = answers([worker.actor.stack.remote() for worker in workers])
        node_ids = {rank: worker.metadata.node_id for rank, worker in enumerate(workers)}
        found = waiting.report(stacks, node_ids, TRAINING_THREAD)
        if order_id is None:
            logger.warning("nothing has moved for %.0f s: %s", quiet_s, found["summary"])
        facts = {"id": order_id, "quiet_s": round(quiet_s, 1), "step": self._log.journal.last_step}
        self._log.journal.emit(EventKind.STACKS, {**facts, **found})
