"""Evaluation: whole micro-batches shared out over ranks, averaged exactly, the same at any world size."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.loader import KeyedDataset, Loaded, Loader, collate_of, loader_options, num_loader_workers, to_device
from train_fn.modes import evaluating
from train_fn.precision import autocast
from train_fn.randomness import seed_micro_batch
from train_fn.replica import Replica
from train_fn.sampler import MicroBatch, share_of
from train_fn.stream_set import WholePass
from train_fn.tasks.checks import is_iterable, told
from train_fn.tasks.metrics import OwnMetrics, build_own_metrics

MIN_MICRO_BATCH = 128
"""Evaluation keeps no gradients, so that its micro-batches can be larger than those of training."""

Sums = dict[str, tuple[float, float]]


def evaluate(ctx: WorkerContext, replica: Replica) -> dict[str, float]:
    """Metrics over the validation set: ``val_loss``, ``val_accuracy`` and whatever the task measures; ``ema_val_…`` of the average.

    A collective. Every rank returns the same numbers; an empty dict where nothing is held out.
    """
    if replica.val_set is None or (not is_iterable(replica.val_set) and len(replica.val_set) == 0):
        return {}
    metrics = {f"val_{name}": value for name, value in _averages(ctx, replica).items()}
    if replica.state.ema is not None:
        with replica.state.ema.in_place():
            metrics |= {f"ema_val_{name}": value for name, value in _averages(ctx, replica).items()}
    replica.volatile.find_unnoticed()
    return metrics


def _averages(ctx: WorkerContext, replica: Replica) -> dict[str, float]:
    """Each metric's sum over its weight. Sums are rounded once, so that how micro-batches were shared out does not show."""
    own = build_own_metrics(replica.task)
    with evaluating(replica.state.model), replica.volatile.kept():
        mine = _measure_share(ctx, replica, own)
    shares = replica.peers.gather((mine, own.states()))
    measured = [sums for share, _ in shares for sums in share]
    averages = {}
    for name in measured[0] if measured else ():
        weight = math.fsum(sums[name][1] for sums in measured)
        averages[name] = math.fsum(sums[name][0] for sums in measured) / weight if weight else math.nan
    return averages | own.computed([states for _, states in shares])


@torch.no_grad()
def _measure_share(ctx: WorkerContext, replica: Replica, own: OwnMetrics) -> list[Sums]:
    """This rank's micro-batches, in order; what belongs to the task's own metrics is entered there."""
    spec, device = ctx.spec, ctx.device
    measured = []
    own.to(device)
    with closing(_whole_pass(ctx, replica) if is_iterable(replica.val_set) else _by_index(ctx, replica)) as batches:
        for number, batch in batches:
            replica.volatile.rewind()  # a model may change its buffers in eval mode as well
            seed_micro_batch(spec.train.seed, replica.state.step, number, device)
            with autocast(spec.train.precision, device):
                measured.append(own.update(_measure(replica.task, replica.state.model, batch)))
    return [{name: (float(total), float(weight)) for name, (total, weight) in sums.items()} for sums in measured]


def _by_index(ctx: WorkerContext, replica: Replica) -> Generator[tuple[int, Any]]:
    """This rank's contiguous share of the micro-batches, with their numbers."""
    spec, size = ctx.spec, _size(ctx)
    num_samples = len(replica.val_set)  # type: ignore[arg-type]
    numbers = share_of(-(-num_samples // size), replica.peers.rank, replica.peers.world_size)
    keys = [
        MicroBatch(0, number, np.arange(number * size, min((number + 1) * size, num_samples), dtype=np.int64)) for number in numbers
    ]
    dataset = KeyedDataset(replica.val_set, spec.train.seed, collate_of(replica.task), training=False)
    loader = Loader(dataset, keys, spec, ctx.local_world_size, ctx.device)
    try:
        for number, loaded in zip(numbers, loader, strict=True):
            yield number, loaded.batch
    finally:
        loader.close()


def _whole_pass(ctx: WorkerContext, replica: Replica) -> Generator[tuple[int, Any]]:
    """Of an iterable set every rank reads all, and measures every so many-th micro-batch."""
    spec, peers = ctx.spec, replica.peers
    collate = collate_of(replica.task)
    whole = WholePass(replica.val_set, _size(ctx), peers.rank, peers.world_size, spec.train.seed, collate)
    num_workers = min(1, num_loader_workers(spec, replica.val_set, ctx.local_world_size))
    loaded: Loaded
    for loaded in DataLoader(whole, batch_size=None, **loader_options(spec, num_workers, ctx.device)):
        yield int(loaded.indices[0]), to_device(loaded.batch, ctx.device)


def _size(ctx: WorkerContext) -> int:
    return max(ctx.spec.micro_batch_size, MIN_MICRO_BATCH)


def _measure(task: Any, model: torch.nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
    """What the task measures of one micro-batch, its loss at least."""
    sums: dict[str, tuple[Any, Any]] = task.metrics(model, batch) if hasattr(task, "metrics") else {}
    if not isinstance(sums, dict):
        raise BadTask(f"{told(task, 'metrics')} must return a dict of (sum, weight) by name, not {sums!r:.200}")
    return sums if "loss" in sums else {"loss": task.loss(model, batch), **sums}
