"""The commits of one rank: sent to the other ranks, compared with theirs, and reported."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from storage.run_control import Stop
from train_fn.errors import StepNotWhole
from train_fn.protect.batches import EqualBatches, Share
from train_fn.protect.loop_state import MOST_VALUES, LoopState, Values, received, sent
from train_fn.samples.ledger import Count
from train_fn.session.report import DATA_WAIT
from train_fn.session.session import Session
from train_fn.step.peers import Peers
from train_fn.step.report import ReportRows, StepReport, Votes, stop_of

SETTLE_S = 2.0
"""Longest wait of a rank that leaves for what its peers said of the newest step: those that live
are milliseconds away from saying it."""
_NO_SAMPLES = Count()

logger = logging.getLogger(__name__)


class Commits:
    """Say what this rank commits, and read what all ranks said of it."""

    def __init__(
        self,
        session: Session,
        state: LoopState,
        agreement: Agreement,
        updates: Updates,
    ) -> None:
        self._session, self._is_first = session, session.ctx.world_rank == 0
        self._state, self._agreement = state, agreement
        self.updates = updates
        self.stop: Stop | None = None
        """The stop that all ranks have read of."""
        self.saves_agreed = False
        """Whether the newest state that was read of is to be saved."""
        self.ends_epoch = False
        """Whether it ended an epoch on all ranks."""
        self._saves = False
        self._equal = EqualBatches()
        self._values: Values = {}
        self._num_samples: int | None = None
        self._waited_s: float | None = None
        self._step_s = 0.0
        self._data_wait: float | None = None
        """The share of the step that was read of last in which a rank waited for its data."""

    @property
    def fault(self) -> str | None:
        """Return how the ranks differ in the newest commit; None while that is not known."""
        return self._agreement.fault

    def start(
        self,
        share: Share | None,
        values: Values,
        waited_s: float | None = None,
        *,
        saves: bool = False,
    ) -> None:
        """Send the newest commit to the other ranks.

        Args:
            share: what the step trained on, from Everstep's loader.
            values: the step's metrics.
            waited_s: how long this rank waited for its data; None if that is not known.
            saves: whether this rank wants the state to be saved.
        """
        self._values, self._saves, self._waited_s = values, saves, waited_s
        self._num_samples = share.whole.num_samples if share else None
        self.updates.commit()
        self._agreement.start(
            self._report_of(share.own if share else _NO_SAMPLES), share.whole if share else None
        )

    def end(self) -> None:
        """Tell the other ranks that this one has left its loop."""
        self._agreement.start(self._report_of(_NO_SAMPLES, has_ended=True), None)

    def _report_of(self, samples: Count, *, has_ended: bool = False) -> StepReport:
        hashed, values = sent(self._values) if self._is_first else (0, ())
        return StepReport(
            self._state.step,
            samples,
            values,
            votes=Votes(
                self._session.ctx.journal.stop_requested,
                save=self._saves,
                data_s=self._waited_s or 0.0,
            ),
            num_updates=self.updates.num,
            has_ended=has_ended,
            names_hash=hashed,
            batch=0 if has_ended else self._state.batch_mark,
            ends_epoch=self._state.ends_epoch and not has_ended,
        )

    def read(self) -> None:
        """Wait for what the ranks said of the newest commit. Raises StepNotWhole, and BadTask if
        ranks train on the same batches."""
        agreed = self._agreement.read()
        self._note(agreed)
        if agreed is not None and not agreed[0].has_ended:
            self._equal.note(tuple(each.batch for each in agreed))

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

    def _note(self, agreed: list[StepReport] | None) -> None:
        if agreed is None:
            return
        self.stop, self.saves_agreed = stop_of(agreed), agreed[0].votes.save
        self.ends_epoch = all(each.ends_epoch for each in agreed)
        self.updates.agree()
        first = agreed[0]
        if not self._is_first and not first.has_ended:
            self._report(received(self._values, first.names_hash, first.numbers))
        if self._waited_s is not None and self._step_s:
            self._data_wait = min(1.0, max(each.votes.data_s for each in agreed) / self._step_s)

    def report(self) -> None:
        """Report the step. Other ranks than 0 do so once they know rank 0's numbers: a survivor
        reports again what rank 0 may not have delivered."""
        if self._is_first:
            self._report(self._values)

    def _report(self, values: Values) -> None:
        reported = dict(values)
        if self._data_wait is not None:  # of the step before: rank 0 has not read of this one
            reported.setdefault(DATA_WAIT, self._data_wait)
        self._step_s = self._session.reporter.step_done(reported, self._num_samples)

    def close(self) -> None:
        """End the exchange on a rank whose peers live."""
        self._agreement.close()


# ---------------------------------------------------------------- agreement

# What the ranks tell each other of every committed step, in one small exchange beside training.
#
# A rank starts it when it commits a step (``start``), and reads it before it changes anything for
# the next one (``read``). By then every rank has taken part in that next step's gradients, so the
# answer is there. If the ranks did not commit the same step, the present one is not used: nothing
# of it was saved, since whoever saves reads the agreement first.

_LOOK_S = 0.001


class Agreement:
    """The exchange of one rank. It has a process group of its own: on the user's, a rank that makes
    another number of steps would have its numbers summed with its peers' gradients.

    A collective: all ranks make it at once.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._group: Any = None if peers.alone else dist.new_group(backend="gloo")
        self._rows = ReportRows(MOST_VALUES)
        self._said: StepReport | None = None
        self._expected: Count | None = None
        self._arriving = torch.empty(0)
        self._work: dist.Work | None = None
        self.fault: str | None = None
        """Why the newest step must not be used, once that is known."""

    def start(self, report: StepReport, expected: Count | None) -> None:
        """Tell the others of a committed step. ``expected`` counts all samples of its global
        batch."""
        self._said, self._expected = report, expected
        own = torch.frombuffer(bytearray(self._rows.encode(report)), dtype=torch.uint8)
        self._arriving = own.new_zeros(self._peers.world_size, len(own))
        self._arriving[self._peers.rank] = own
        if self._group is not None:
            rows = self._arriving.view(-1)
            self._work = self._peers.start_all_gather(rows, own, self._group)

    def read(self) -> list[StepReport] | None:
        """Wait for what all ranks said of the newest step, and return it; None if it was read.

        Raises StepNotWhole on every rank if they did not all commit the same step. A dead peer
        raises what its collective does.
        """
        if self._said is None:
            return None
        if self._work is not None:
            self._work.wait()
        return self._checked()

    @property
    def is_pending(self) -> bool:
        """Return whether the newest step was committed, and not read of."""
        return self._said is not None

    def settle(self, within_s: float) -> list[StepReport] | None:
        """Return what all ranks said of the newest step, after an error; None if a peer died before
        it could say anything.

        Raises StepNotWhole if they have not.
        """
        deadline = time.monotonic() + within_s
        while self._work is not None and not self._work.is_completed():
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_S)
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError:
                return None
        return self._checked()

    def exchange(self, own: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank, each of this size. A collective: no commit is
        on its way."""
        return [own] if self._group is None else self._peers.exchange(own, self._group)

    def close(self) -> None:
        """End the exchange on a rank whose peers live."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _checked(self) -> list[StepReport]:
        said = self._said
        assert said is not None
        self._said = self._work = None
        found = [self._rows.decode(bytes(row.numpy())) for row in self._arriving]
        self.fault = difference(said, found, self._expected)
        Session.agree(max(0, said.step - 1), self.fault)
        return [report for report in found if report is not None]


def difference(
    said: StepReport, of_ranks: Sequence[StepReport | None], expected: Count | None
) -> str | None:
    """Return how the ranks differ; None if all of them did what this one did.

    Args:
        said: what this rank said.
        expected: all samples of the step's global batch; None if they are not known.
    """
    for rank, report in enumerate(of_ranks):
        if report is None:
            return f"rank {rank} said nothing of step {said.step}"
        if report.step != said.step:
            return f"rank {rank} committed step {report.step} where this rank committed {said.step}"
        if report.num_updates != said.num_updates:
            return (
                f"rank {rank} made {report.num_updates} optimizer steps up to step {said.step}, "
                f"this rank {said.num_updates}"
            )
    found = [report for report in of_ranks if report is not None]
    if (num_ended := sum(each.has_ended for each in found)) not in (0, len(found)):
        return f"{num_ended} of {len(found)} ranks left their loop after it"
    samples = sum((each.samples for each in found), Count())
    if expected is not None and (samples.num_samples, samples.sample_hash) != (
        expected.num_samples,
        expected.sample_hash,
    ):
        return (
            f"the ranks' samples are not those of its global batch ({samples.num_samples} of "
            f"{expected.num_samples}); give es.loader the same dataset, global_batch_size and "
            "seed on all ranks"
        )
    return None


# ---------------------------------------------------------------- updates

# How many optimizer steps a loop makes, and whether a commit made as many as the others.


class Updates:
    """Count the optimizer steps of this attempt, and those of each commit.

    A commit is regular if it made as many as the first one that the ranks agreed on. If a peer dies
    before it can say that it made the same step, a rank keeps the state of a regular commit only.
    """

    def __init__(self, *, may_skip: bool) -> None:
        """``may_skip``: a commit without an optimizer step is regular, too. A gradient scaler makes
        such ones."""
        self._may_skip = may_skip
        self._num_committed = 0
        self.num = 0
        """Optimizer steps since the attempt began."""
        self.of_commit = 0
        """Those of the newest commit."""
        self.usual: int | None = None
        """Those of the first commit that the ranks agreed on; None before."""
        self.is_regular = True
        """Whether the newest commit is one like the others."""

    def count(self) -> None:
        """Count an optimizer step."""
        self.num += 1

    @property
    def since_commit(self) -> int:
        """Return the steps since the newest commit."""
        return self.num - self._num_committed

    def commit(self) -> None:
        """Take the steps since the commit before as those of the newest one."""
        self.of_commit = self.num - self._num_committed
        self._num_committed = self.num
        usual = self.of_commit if self.usual is None else self.usual
        self.is_regular = self.of_commit == usual or (self._may_skip and not self.of_commit)

    def agree(self) -> None:
        """Note that the ranks agreed on the newest commit."""
        if self.usual is None and self.of_commit:
            self.usual = self.of_commit
