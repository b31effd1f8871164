"""Evaluation: whole micro-batches shared out over ranks, averaged exactly, the same at any world size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.loader import KeyedDataset, Loader, collate_of
from train_fn.precision import autocast
from train_fn.randomness import seed_micro_batch
from train_fn.replica import Replica
from train_fn.sampler import MicroBatch, share_of
from train_fn.tasks.checks import told

MIN_MICRO_BATCH = 128
"""Evaluation keeps no gradients, so that its micro-batches can be larger than those of training."""

Sums = dict[str, tuple[float, float]]


def evaluate(ctx: WorkerContext, replica: Replica) -> dict[str, float]:
    """Metrics over the validation set: ``val_loss``, ``val_accuracy`` and whatever the task measures; ``ema_val_…`` of the average.

    A collective. Every rank returns the same numbers; an empty dict where nothing is held out.
    """
    if replica.val_set is None or len(replica.val_set) == 0:
        return {}
    metrics = {f"val_{name}": value for name, value in _averages(ctx, replica).items()}
    if replica.state.ema is not None:
        with replica.state.ema.in_place():
            metrics |= {f"ema_val_{name}": value for name, value in _averages(ctx, replica).items()}
    return metrics


def _averages(ctx: WorkerContext, replica: Replica) -> dict[str, float]:
    """Each metric's sum over its weight. Sums are rounded once, so that how micro-batches were shared out does not show."""
    model = replica.state.model
    model.eval()
    try:
        mine = _measure_share(ctx, replica)
    finally:
        model.train()
    measured = [sums for share in replica.peers.gather(mine) for sums in share]
    averages = {}
    for name in measured[0]:
        weight = math.fsum(sums[name][1] for sums in measured)
        averages[name] = math.fsum(sums[name][0] for sums in measured) / weight if weight else math.nan
    return averages


@torch.no_grad()
def _measure_share(ctx: WorkerContext, replica: Replica) -> list[Sums]:
    """This rank's micro-batches, in order."""
    spec, device = ctx.spec, ctx.device
    size = max(spec.micro_batch_size, MIN_MICRO_BATCH)
    num_samples = len(replica.val_set)  # type: ignore[arg-type]
    numbers = share_of(-(-num_samples // size), replica.peers.rank, replica.peers.world_size)
    keys = [
        MicroBatch(0, number, np.arange(number * size, min((number + 1) * size, num_samples), dtype=np.int64)) for number in numbers
    ]
    dataset = KeyedDataset(replica.val_set, spec.train.seed, collate_of(replica.task), training=False)
    loader = Loader(dataset, keys, spec, ctx.local_world_size, device)
    measured = []
    try:
        for number, (_, batch) in zip(numbers, loader, strict=True):
            seed_micro_batch(spec.train.seed, replica.state.step, number, device)
            with autocast(spec.train.precision, device):
                measured.append(_measure(replica.task, replica.state.model, batch))
    finally:
        loader.close()
    return [{name: (float(total), float(weight)) for name, (total, weight) in sums.items()} for sums in measured]


def _measure(task: Any, model: torch.nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
    """What the task measures of one micro-batch, its loss at least."""
    sums: dict[str, tuple[Any, Any]] = task.metrics(model, batch) if hasattr(task, "metrics") else {}
    if not isinstance(sums, dict):
        raise BadTask(f"{told(task, 'metrics')} must return a dict of (sum, weight) by name, not {sums!r:.200}")
    return sums if "loss" in sums else {"loss": task.loss(model, batch), **sums}
