"""What a driver does beside the training: it watches for stops, orders and its own successor."""

from __future__ import annotations

import logging
import os
import threading
import time

from storage.claims import successor
from storage.errors import StorageError
from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn.drills import Drills, Faults
from train_fn.errors import Replaced
from train_fn.journal.client import ActorJournalClient, PassedOrders
from train_fn.recovery.outcome import Stopping

EXIT_REPLACED = 3
STOP_POLL_S = 0.5
ORDER_POLL_S = 0.5
FENCE_POLL_S = 5.0

logger = logging.getLogger(__name__)


def require_newest(run_dir: RunDir, submission: int) -> None:
    """Raise Replaced if a newer submission of the run has begun."""
    newest = max(run_dir.submissions(), default=0)
    if newest > submission:
        raise replaced(run_dir, newest, submission)
    why = successor(run_dir, (submission, 0))
    if why is not None:
        raise Replaced(why)


def replaced(run_dir: RunDir, newest: int | None, submission: int) -> Replaced:
    """Return the error of a submission that ``newest`` has taken over from; None if its number is
    not known."""
    by = "a newer submission" if newest is None else f"submission {newest}"
    return Replaced(f"{by} of run {run_dir.run_id} has taken over from submission {submission}")


class ControlWatch:
    """Two threads that read the run directory until ``close``."""

    def __init__(
        self, run_dir: RunDir, submission: int, client: ActorJournalClient, stopping: Stopping
    ) -> None:
        self._run_dir, self._submission = run_dir, submission
        self._client, self._stopping = client, stopping
        self._done = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.watch_stops, name="stop-watch", daemon=True).start()
        threading.Thread(target=self.watch_orders, name="orders", daemon=True).start()

    def close(self) -> None:
        """End both threads, each after what it is doing."""
        self._done.set()

    def watch_stops(self) -> None:
        """Send the user's stop, or the deadline's, to the journal, whose replies tell every rank.
        End this process once a newer submission has taken over."""
        next_fence = time.monotonic() + FENCE_POLL_S
        while not self._done.wait(STOP_POLL_S):
            asked: Stop | None = None
            try:
                asked = self._run_dir.stop_requested(self._submission)
                if time.monotonic() >= next_fence:
                    next_fence = time.monotonic() + FENCE_POLL_S
                    require_newest(self._run_dir, self._submission)
            except Replaced as exc:
                logger.error("%s; this driver ends now", exc)
                os._exit(EXIT_REPLACED)
            except StorageError as exc:
                logger.warning("the run directory could not be read, trying again: %s", exc)
            stop = self._stopping.decide(asked, time.time())
            if stop is not None:
                self._client.announce_stop(stop)

    def watch_orders(self) -> None:
        """Carry out drills, and pass on orders for profiles and stacks. On a thread of its own,
        since drills take seconds."""
        passed_on = PassedOrders(self._run_dir, self._submission, self._client)
        drills = Drills(self._run_dir, self._submission, self._client, _ray_faults)
        while not self._done.wait(ORDER_POLL_S):
            for tick in (passed_on.tick, drills.tick):
                try:
                    tick()
                except Exception as exc:
                    # an order that cannot be read must not take the driver along
                    logger.warning("orders could not be looked for, trying again: %s", exc)


def _ray_faults() -> Faults:
    from train_fn.ray_train.journal_actor import RayFaults

    return RayFaults()
