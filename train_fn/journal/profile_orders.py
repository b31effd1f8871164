"""Pass requests for profiles and stacks from the run directory to the ranks and their controller,
each of them once. Runs in the driver."""

from __future__ import annotations

from everstep.wire.events import EventKind
from storage.run_dir import RunDir
from train_fn.journal.client import ActorJournalClient


class StackOrders:
    """Read requests for the ranks' stacks, and send them to the journal, whose replies reach the
    controller. Not thread-safe."""

    def __init__(self, run_dir: RunDir, submission: int, journal: ActorJournalClient) -> None:
        self._run_dir, self._submission, self._journal = run_dir, submission, journal
        self._passed_on: str | None = None

    def tick(self) -> None:
        """Pass on the newest request. Raise StorageError if it cannot be read; the next tick
        retries."""
        order = self._run_dir.stacks_ordered(self._submission)
        if order is None or order.id == self._passed_on:
            return
        self._passed_on = order.id
        self._journal.emit(EventKind.STACKS_ORDERED, {"id": order.id}, attempt=order.attempt)


class ProfileOrders:
    """Read requests and send them to the journal, whose replies reach every rank. Not
    thread-safe."""

    def __init__(self, run_dir: RunDir, submission: int, journal: ActorJournalClient) -> None:
        self._run_dir = run_dir
        self._submission = submission
        self._journal = journal
        self._passed_on: str | None = None
        """Id of the newest request. Each submission has its own file, so requests for an older
        driver are never seen."""

    def tick(self) -> None:
        """Pass on the newest request. Raise StorageError if it cannot be read; the next tick
        retries."""
        order = self._run_dir.profile_ordered(self._submission)
        if order is None or order.id == self._passed_on:
            return
        self._passed_on = order.id
        data = {"id": order.id, "rank": order.rank, "steps": order.steps}
        self._journal.emit(EventKind.PROFILE_ORDERED, data, attempt=order.attempt)
