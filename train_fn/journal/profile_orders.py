"""Profiles in the driver: an order from the run directory is passed on to the ranks, each one
once."""

from __future__ import annotations

from everstep.wire.events import EventKind
from storage.run_dir import RunDir
from train_fn.journal.client import ActorJournalClient


class ProfileOrders:
    """Looks for orders and tells the journal, whose replies reach every rank. Not thread-safe."""

    def __init__(self, run_dir: RunDir, submission: int, journal: ActorJournalClient) -> None:
        self._run_dir = run_dir
        self._submission = submission
        self._journal = journal
        self._passed_on: str | None = None
        """Id of the newest order; each submission has a file of its own, so that an older driver's
        are never seen."""

    def tick(self) -> None:
        """Pass the newest order on. Raises StorageError where it could not be read: the next tick
        tries again."""
        order = self._run_dir.profile_ordered(self._submission)
        if order is None or order.id == self._passed_on:
            return
        self._passed_on = order.id
        told = {"id": order.id, "rank": order.rank, "steps": order.steps}
        self._journal.emit(EventKind.PROFILE_ORDERED, told, attempt=order.attempt)
