"""The gradients of one global batch: every rank runs its micro-batches forward and backward.

Below: the same with equal bits at every world size.
"""

from __future__ import annotations

from typing import Any

import torch

from storage.run_control import Stop
from train_fn.elastic.exchange import Exchange
from train_fn.errors import PeersGone
from train_fn.loop.training import Training
from train_fn.samples.ledger import Count, difference
from train_fn.samples.sampler import MicroBatch
from train_fn.step.totals import StepTotals


def forward_backward(training: Training) -> StepTotals:
    """Compute the gradients of the global batch's mean loss, and exchange the step's totals.

    A collective. It returns on every rank, or on none, with the same totals and gradients.
    """
    replica, loader = training.replica, training.loader
    state, volatile, carrier = replica.state, replica.volatile, replica.carrier
    num_samples, share, hashes, expected = replica.plans.of(state.step)
    scale = replica.loss_scale(num_samples)
    carrier.begin(state.step, expected, replica.fingerprints.header)
    num_passes = replica.num_passes(len(share))
    training.begin(num_samples, num_passes)
    for position in range(num_passes):
        batch, number, differs, own_samples = None, 0, None, 0
        if position < len(share):
            micro = share[position]
            batch, differs = load_next(training, micro, hashes[position])
            number, own_samples = micro.number, len(micro.indices)
        last = position == num_passes - 1
        with replica.synchronising(last), training.watched(number):
            if position:
                volatile.rewind()
            replica.seed(state.step, number)
            loss_sum, weight = replica.forward(batch)
            volatile.passed(own_samples)
            carrier.add(loss_sum, weight, differs)
            loss = state.scaler.scale(loss_sum * scale)
            if last:
                _last_backward(training, loss)
            else:
                loss.backward()  # type: ignore[no-untyped-call]
    loader.prefetch()  # the device computes meanwhile
    # A GPU digests the sums once it has them, while this thread waits. A CPU may not have them yet.
    digests_ahead = replica.used is None and not replica.peers.on_cpu
    if digests_ahead:
        _start_digests(training)
    volatile.wait()
    return settle(training, carrier.take(), has_digests=digests_ahead)


def settle(training: Training, totals: StepTotals, *, has_digests: bool = False) -> StepTotals:
    """Do what follows the exchange of a step, if it is whole: agree on new tensors, drop gradients
    that no rank used, and digest the rest. Return the totals. A collective.

    Args:
        has_digests: whether the digests were started before.
    """
    replica, state = training.replica, training.replica.state
    if totals.fault(state.step, replica.plans.of(state.step).num_samples) is None:
        if totals.facts.num_with_news:
            replica.volatile.agree()
        if replica.used is not None:
            replica.used.drop_unused()
        if not has_digests:
            _start_digests(training)
    training.progress.own_s = training.clock.gate()
    return totals


def _start_digests(training: Training) -> None:
    """Start to digest the gradients that the ranks have summed, and a part of the weights. Drills
    flip their bits before. Only a step that is whole takes these digests."""
    replica, audit = training.replica, training.audit
    training.flips.flip(replica, is_audited=audit is not None and audit.is_due)
    replica.fingerprints.start(replica.state.step, gradient=replica.own_updates is None)


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


def decisions(training: Training) -> tuple[Stop | None, int, bool]:
    """Start to exchange what forward passes changed. Return the stop that this rank has received,
    the step of a checkpoint to report, and whether to save. Every rank calls this once a step,
    before its last backward pass.

    Raise PeersGone if the attempt was given up.
    """
    if training.ctx.is_abandoned():
        raise PeersGone("this attempt was given up; another one follows")
    stop, committed, save = training.saver.decisions(training.progress.reported_checkpoint)
    training.replica.volatile.start()
    return training.ctx.journal.stop_requested or stop, committed, save


def _last_backward(training: Training, loss: torch.Tensor) -> None:
    """Run the last backward pass of a step. The step's totals travel with its gradients."""
    replica = training.replica
    stop, committed, save = decisions(training)
    replica.carrier.backward(
        loss,
        stop,
        committed,
        save=save,
        has_news=replica.volatile.has_news,
        own_s=training.progress.own_s,
    )
    replica.finish_exchange()


# ---------------------------------------------------------------- elastic step

# The gradients of one global batch with ``train.exactness: elastic``: the same bits at every world
# size.


def elastic_step(training: Training, exchange: Exchange) -> StepTotals:
    """Compute the gradients of the global batch's mean loss, and exchange the step's totals. Those
    of each micro-batch are computed alone, and added in an order that no rank decides.

    A collective. It returns on every rank, or on none, with the same totals and gradients.
    """
    replica = training.replica
    state, volatile = replica.state, replica.volatile
    num_samples, share, hashes, expected = replica.plans.of(state.step)
    scale = replica.loss_scale(num_samples)
    exchange.begin(state.step, state.k, expected.samples, replica.fingerprints.header)
    training.begin(num_samples, len(share))
    for position, micro in enumerate(share):
        batch, differs = load_next(training, micro, hashes[position])
        if position:
            volatile.rewind()
        replica.seed(state.step, micro.number)
        with training.watched(micro.number):
            loss_sum, weight = replica.forward(batch)
            volatile.passed(len(micro.indices), micro.number)
            exchange.add(loss_sum, weight, differs)
            loss = state.scaler.scale(loss_sum * scale)
            if position == len(share) - 1:
                _send(training, exchange, micro.number)
            loss.backward()  # type: ignore[no-untyped-call]
        exchange.fold(micro.number)
    if not share:
        _send(training, exchange, None)
    replica.trained.check_flags()
    training.loader.prefetch()  # the device computes meanwhile
    totals = exchange.take()
    volatile.wait()
    return settle(training, totals)


def _send(training: Training, exchange: Exchange, last: int | None) -> None:
    """Send what the ranks need to know of this step before the last backward pass."""
    stop, committed, save = decisions(training)
    exchange.send(
        last,
        stop,
        committed,
        save=save,
        has_news=training.replica.volatile.has_news,
        own_s=training.progress.own_s,
    )
