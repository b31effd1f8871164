"""The step of a task that makes it itself: ``training_step(model, batch, step, optimizers)``.

The task runs its own forward and backward passes over this rank's share of the global batch, and
steps one or more optimizers, as a GAN does. Each of their steps is a collective, so a rank may die
when others have changed their weights. So the state is copied before the step, and a rank that
fails within it leaves the copy. The gate and the commit are those of any other task.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from train_fn.errors import BadTask, PeersGone
from train_fn.loop.commit import set_rates
from train_fn.loop.gradients import load_next, settle
from train_fn.loop.replica import Replica
from train_fn.loop.training import Training
from train_fn.samples.ledger import Count
from train_fn.samples.sampler import MicroBatch
from train_fn.step.totals import StepTotals
from train_fn.tasks.own import LOSS, MOST_VALUES


def make_step(training: Training) -> StepTotals:
    """Let the task make its step, and exchange the step's totals.

    A collective. It returns on every rank, or on none, with the same totals and weights.
    """
    replica = training.replica
    state, own, volatile = replica.state, replica.own_updates, replica.volatile
    assert own is not None
    num_samples, _, _, expected = replica.plans.of(state.step)
    replica.carrier.begin(state.step, expected, replica.fingerprints.header)
    micro, batch, own_samples, differs = _batch_of(training)
    own.lr = set_rates(training)
    own.shadow.take()
    state.complete = False  # until the commit
    training.begin(num_samples, 1)
    own.mean.begin(state.step, own_samples / num_samples)
    replica.seed(state.step, micro.number)
    values = own.run(state, batch)
    volatile.passed(own_samples)
    training.loader.prefetch()
    volatile.start()
    volatile.wait()
    loss = values.pop(LOSS, torch.zeros(())).to(replica.peers.device)
    replica.carrier.add(loss * own_samples, own_samples, differs)
    totals = _exchange(training, values, own_samples / num_samples)
    return settle(training, totals)


def _batch_of(training: Training) -> tuple[MicroBatch, Any, int, Count | None]:
    """Return what this rank trains on: its share, the batch, how many of its samples count, and how
    they differ from those that the sampler expects.

    A rank without a share, in a short batch, trains on that of rank 0, which then does not count:
    it must take part in every collective.
    """
    replica = training.replica
    state, sampler = replica.state, replica.sampler
    _, share, hashes, _ = replica.plans.of(state.step)
    if share:
        micro, own_samples = share[0], len(share[0].indices)
        batch, differs = load_next(training, micro, hashes[0])
    else:
        [micro] = sampler.share(state.epoch, state.k, 0, replica.peers.world_size)
        own_samples, differs = 0, None
        batch = replica.load(micro).batch
    if batch is None:
        raise BadTask(
            "collate returned None for a rank's share of a global batch, and training_step needs a "
            "batch. Return the samples that are usable, and leave broken ones out of the data set"
        )
    return micro, batch, own_samples, differs


def _exchange(training: Training, values: dict[str, torch.Tensor], weight: float) -> StepTotals:
    """Sum the step's totals over ranks, and the task's metrics. A collective.

    Raise PeersGone if the attempt was given up, and BadTask if the ranks made other updates.
    """
    replica, progress = training.replica, training.progress
    own, peers, carrier = replica.own_updates, replica.peers, replica.carrier
    assert own is not None
    if training.ctx.is_abandoned():
        raise PeersGone("this attempt was given up; another one follows")
    stop, committed, save = training.saver.decisions(progress.reported_checkpoint)
    numbers = carrier.gradient(
        training.ctx.journal.stop_requested or stop,
        committed,
        save,
        progress.own_s,
        replica.volatile.has_news,
    )
    extra = torch.zeros(1 + MOST_VALUES, device=peers.device)
    extra[0] = float(own.mean.num_updates)
    for at, value in enumerate(values.values(), start=1):
        extra[at] = value.to(peers.device) * weight if weight else 0.0
    # Encoded for DDP, which divides by the world size.
    sent = torch.cat([numbers.to(peers.device) / peers.world_size, extra])
    work = peers.start_sum(sent)
    if work is not None:
        work.wait()
    sums = peers.result(sent)
    totals = carrier.totals_of(sums[: len(numbers)].numpy().tobytes())
    num_updates, *found = sums[len(numbers) :].tolist()
    if _is_whole(replica, totals) and num_updates != own.mean.num_updates * peers.world_size:
        raise BadTask(
            f"{own.source} stepped optimizers {own.mean.num_updates} times in step "
            f"{replica.state.step + 1} on this rank, and another number of times on others. Let "
            "nothing that only a rank's own samples say decide how often an optimizer steps"
        )
    own.values = {
        name: value if math.isfinite(value) else None
        for name, value in zip(values, found, strict=False)
    }
    return totals


def _is_whole(replica: Replica, totals: StepTotals) -> bool:
    state = replica.state
    return totals.fault(state.step, replica.plans.of(state.step).num_samples) is None
