"""One step of one rank up to the gate: its micro-batches forward and backward, and what the ranks
exchange of them.

There is one loop over micro-batches (``run_passes``) and four ways to exchange: by DDP
(``StepExchange``), by FSDP2 (``sharded.ShardedStep``), by sums whose bits are the same at every
world size (``TreeStep``), and by the optimizers' own steps (``own_step.OwnStep``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from everstep.spec.sections import ScheduleSpec
from train_fn.elastic.exchange import Exchange
from train_fn.samples.ledger import Count, difference
from train_fn.samples.sampler import MicroBatch
from train_fn.state.optim import lr_factor
from train_fn.step.report import StepTotals, Votes
from train_fn.step.report_sums import StepPlan
from train_fn.tasks.protocol import Sum

if TYPE_CHECKING:
    from train_fn.loop.replica import Replica
    from train_fn.loop.training import Training


def run_passes(training: Training) -> StepTotals:
    """Compute the gradients of the global batch's mean loss, and exchange the step's totals.

    A collective. It returns on every rank, or on none, with the same totals and gradients.
    """
    replica, exchange = training.replica, training.exchange
    step, volatile = replica.state.step, replica.volatile
    plan = replica.plans.of(step)
    exchange.begin(plan)
    passes = exchange.passes(plan.share)
    training.begin(plan.num_samples, len(passes))
    for position, micro in enumerate(passes):
        batch, differs, own_samples, number = None, None, 0, 0 if micro is None else micro.number
        if position < len(plan.share):
            batch, differs = load_next(training, plan.share[position], plan.hashes[position])
            own_samples = len(plan.share[position].indices)
        elif micro is not None:
            batch = replica.load(micro).batch
        is_last = position == len(passes) - 1
        with exchange.around(is_last), training.watched(number):
            if position:
                volatile.rewind()
            replica.seed(step, number)
            loss_sum, weight = exchange.forward(batch, own_samples)
            volatile.passed(own_samples, number)
            exchange.add(loss_sum, weight, differs)
            if is_last:
                exchange.last_pass(loss_sum, number, votes_of(training))
            else:
                exchange.pass_back(loss_sum, number)
    if not passes:
        exchange.last_pass(None, None, votes_of(training))
    training.loader.prefetch()  # the device computes meanwhile
    # A GPU digests the sums once it has them, while this thread waits. A CPU may not have them yet.
    if exchange.digests_ahead:
        _start_digests(training)
    volatile.wait()
    totals = exchange.take()
    if totals.fault(step, plan.num_samples) is None:
        if replica.used is not None:
            replica.used.drop_unused()
        if not exchange.digests_ahead:
            _start_digests(training)
    training.progress.own_s = training.clock.gate()
    return totals


def load_next(
    training: Training, micro: MicroBatch, expected_hash: int
) -> tuple[Any | None, Count | None]:
    """Return the next batch of the loader, and how its samples differ from those of ``micro``."""
    replica, progress = training.replica, training.progress
    state = replica.state
    progress.phase = "data"
    loaded = next(training.loader)
    if loaded.batch is None:
        replica.note_empty()
    differs = difference(state.epoch, state.step, micro.indices, loaded.indices, expected_hash)
    if state.bookmarks is not None:
        state.bookmarks.note(loaded)
    progress.phase = "step"
    return loaded.batch, differs


def votes_of(training: Training) -> Votes:
    """Start to exchange what forward passes changed, and return what this rank asks for. Every rank
    calls this once a step, before its last backward pass.

    Raise PeersGone if the attempt was given up.
    """
    training.session.require_current()
    progress, volatile = training.progress, training.replica.volatile
    stop, committed, save = training.session.saver.decisions(progress.reported_checkpoint)
    volatile.start()
    stop = training.ctx.journal.stop_requested or stop
    return Votes(stop, committed, save, progress.own_s)


def _start_digests(training: Training) -> None:
    """Start to digest the gradients that the ranks have summed, and a part of the weights. Drills
    flip their bits before. Only a step that is whole takes these digests."""
    replica, audit = training.replica, training.audit
    training.flips.flip(replica, is_audited=audit is not None and audit.is_due)
    replica.fingerprints.start(replica.state.step, gradient=replica.own_updates is None)


def set_rates(replica: Replica, schedule: ScheduleSpec) -> float | None:
    """Set the learning rates of the present step, unless the task's scheduler has. Return that of
    the first group; None if its optimizer computes its own."""
    state = replica.state
    if state.scheduler is not None:
        return replica.learning_rates.present()
    return replica.learning_rates.set(
        lr_factor(schedule, state.step, replica.total_steps, state.steps_per_epoch)
    )


# ---------------------------------------------------------------- exchanges


class StepExchange:
    """Exchange a step by DDP: the reports travel with the gradients.

    A step calls ``begin``; for each of its ``passes``, inside ``around``, ``forward``, ``add``, and
    ``pass_back``, or in the last one ``last_pass``; and ``take``.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica, self._scale = replica, 1.0
        self.digests_ahead = replica.used is None and not replica.peers.on_cpu
        """Whether the sums are on their way once the last pass has returned."""

    def begin(self, plan: StepPlan) -> None:
        """Begin the present step of the state."""
        replica = self._replica
        self._scale = replica.loss_scale(plan.num_samples)
        replica.sums.begin(replica.state.step, plan.expected, replica.fingerprints.header)

    def passes(self, share: Sequence[MicroBatch]) -> Sequence[MicroBatch | None]:
        """Return the forward passes of a rank with this share; None stands for an empty batch."""
        return [*share, *[None] * (self._replica.num_passes(len(share)) - len(share))]

    def around(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of a pass."""
        return self._replica.synchronising(is_last)

    def forward(self, batch: Any | None, own_samples: int) -> tuple[torch.Tensor, Sum]:
        """Return (loss sum, weight) of a batch, of which ``own_samples`` count."""
        return self._replica.forward(batch)

    def add(self, loss_sum: torch.Tensor, weight: Sum, difference: Count | None) -> None:
        """Add a pass to what this rank reports. ``difference`` is the correction from expected to
        loaded samples; None if they are equal."""
        self._replica.sums.add(loss_sum, weight, difference)

    def pass_back(self, loss_sum: torch.Tensor, number: int) -> None:
        """Run the backward pass of micro-batch ``number``, which is not the last one."""
        self._scaled(loss_sum).backward()  # type: ignore[no-untyped-call]

    def last_pass(self, loss_sum: torch.Tensor | None, number: int | None, votes: Votes) -> None:
        """Run the last backward pass, and start to exchange. None stands for a rank without
        passes."""
        assert loss_sum is not None
        self._replica.sums.backward(self._scaled(loss_sum), votes)
        self._replica.finish_exchange()

    def take(self) -> StepTotals:
        """Return the totals over all ranks, once the gradients are summed. Raise the collective's
        error if a peer is gone."""
        return self._replica.sums.take()

    def clip(self, max_norm: float, factor: float) -> float:
        """Clip the gradients and return their norm before that. No collective.

        Args:
            factor: by which they were multiplied since ``take``.
        """
        return float(torch.nn.utils.clip_grad_norm_(self._replica.parameters, max_norm))

    def _scaled(self, loss_sum: torch.Tensor) -> torch.Tensor:
        return self._replica.state.scaler.scale(loss_sum * self._scale)


class TreeStep(StepExchange):
    """Exchange a step with ``train.exactness: elastic``. The gradients of each micro-batch are
    computed alone, and added in an order that no rank decides."""

    def __init__(self, replica: Replica, tree: Exchange) -> None:
        super().__init__(replica)
        self._tree, self.add = tree, tree.add  # type: ignore[method-assign]
        self.digests_ahead = False

    def begin(self, plan: StepPlan) -> None:
        replica = self._replica
        self._scale = replica.loss_scale(plan.num_samples)
        state, fingerprint = replica.state, replica.fingerprints.header
        self._tree.begin(state.step, state.k, plan.expected.samples, fingerprint)

    def passes(self, share: Sequence[MicroBatch]) -> Sequence[MicroBatch | None]:
        return share

    def around(self, is_last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def pass_back(self, loss_sum: torch.Tensor, number: int) -> None:
        super().pass_back(loss_sum, number)
        self._tree.fold(number)

    def last_pass(self, loss_sum: torch.Tensor | None, number: int | None, votes: Votes) -> None:
        self._tree.send(number, votes)
        if loss_sum is not None and number is not None:
            self.pass_back(loss_sum, number)
        self._replica.trained.check_flags()

    def take(self) -> StepTotals:
        return self._tree.take()
