"""The gradients of one global batch with ``train.exactness: elastic``: the same bits at every world
size."""

from __future__ import annotations

from train_fn.elastic.exchange import Exchange
from train_fn.loop.gradients import decisions, load_next, settle
from train_fn.loop.training import Training
from train_fn.step.step_totals import StepTotals


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
