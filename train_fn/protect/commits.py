"""The commits of one rank: sent to the other ranks, compared with theirs, and reported."""

from __future__ import annotations

from storage.run_control import Stop
from train_fn.context import WorkerContext
from train_fn.errors import StepNotWhole
from train_fn.loop.reporter import Reporter
from train_fn.protect.agreement import Agreed, Agreement, Word
from train_fn.protect.batch_marks import EqualBatches
from train_fn.protect.batches import Share
from train_fn.protect.loop_state import LoopState
from train_fn.protect.metrics import Values, received, sent
from train_fn.protect.updates import Updates
from train_fn.samples.ledger import Count

SETTLE_S = 2.0
"""Longest wait of a rank that leaves for what its peers said of the newest step: those that live
are milliseconds away from saying it."""
_NO_SAMPLES = Count()


class Commits:
    """Say what this rank commits, and read what all ranks said of it."""

    def __init__(
        self,
        ctx: WorkerContext,
        state: LoopState,
        agreement: Agreement,
        updates: Updates,
        reporter: Reporter,
    ) -> None:
        self._journal, self._is_first = ctx.journal, ctx.world_rank == 0
        self._state, self._agreement, self._reporter = state, agreement, reporter
        self.updates = updates
        self.stop: Stop | None = None
        """The stop that all ranks have read of."""
        self._equal = EqualBatches()
        self._values: Values = {}
        self._num_samples: int | None = None

    @property
    def fault(self) -> str | None:
        """Return how the ranks differ in the newest commit; None while that is not known."""
        return self._agreement.fault

    def start(self, share: Share | None, values: Values) -> None:
        """Send the newest commit to the other ranks.

        Args:
            share: what the step trained on, from Everstep's loader.
            values: the step's metrics.
        """
        self._values = values
        self._num_samples = share.whole.num_samples if share else None
        self.updates.commit()
        self._agreement.start(
            self._word(share.own if share else _NO_SAMPLES), share.whole if share else None
        )

    def end(self) -> None:
        """Tell the other ranks that this one has left its loop."""
        self._agreement.start(self._word(_NO_SAMPLES, has_ended=True), None)

    def _word(self, samples: Count, *, has_ended: bool = False) -> Word:
        hashed, values = sent(self._values) if self._is_first else (0, ())
        return Word(
            self._state.step,
            self.updates.num,
            self._journal.stop_requested,
            samples,
            has_ended,
            values,
            hashed,
            0 if has_ended else self._state.batch_mark,
        )

    def read(self) -> None:
        """Wait for what the ranks said of the newest commit. Raises StepNotWhole, and BadTask if
        ranks train on the same batches."""
        agreed = self._agreement.read()
        self._note(agreed)
        if agreed is not None and not agreed.num_ended:
            self._equal.note(agreed.batches)

    def settle(self) -> tuple[bool, StepNotWhole | None]:
        """Return whether all ranks are known to have made the newest commit, and how they differ.
        Call it once, after an error."""
        if not self._agreement.is_pending:
            return self.fault is None, None
        try:
            agreed = self._agreement.settle(SETTLE_S)
        except StepNotWhole as fault:
            return False, fault
        if agreed is not None:
            self._note(agreed)
        elif not self._is_first:
            self._report(self._values)  # what rank 0 had is not known
        return agreed is not None, None

    def _note(self, agreed: Agreed | None) -> None:
        if agreed is None:
            return
        self.stop = agreed.stop
        self.updates.agree()
        if not self._is_first and not agreed.num_ended:
            self._report(received(self._values, agreed.names_hash, agreed.values))

    def report(self) -> None:
        """Report the step. Other ranks than 0 do so once they know rank 0's numbers: a survivor
        reports again what rank 0 may not have delivered."""
        if self._is_first:
            self._report(self._values)

    def _report(self, values: Values) -> None:
        self._reporter.step_done(dict(values), self._num_samples)

    def close(self) -> None:
        """End the exchange on a rank whose peers live."""
        self._agreement.close()
