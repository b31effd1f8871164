"""The micro-batches of the validation set that one rank measures, with their numbers."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from train_fn.context import WorkerContext
from train_fn.loop.replica import Replica
from train_fn.samples.loader import (
    KeyedDataset,
    Loaded,
    Loader,
    collate_of,
    loader_options,
    num_loader_workers,
    to_device,
)
from train_fn.samples.sampler import MicroBatch, share_of
from train_fn.samples.whole_pass import WholePass

MIN_MICRO_BATCH = 128
"""Smallest micro-batch here. Evaluation keeps no gradients, so its micro-batches may be larger than
in training."""


def batches_by_index(
    ctx: WorkerContext, replica: Replica, most: int | None = None
) -> Generator[tuple[int, Any]]:
    """Yield this rank's contiguous share of the micro-batches, with their numbers. With ``most``,
    yield that many, read by one loader process."""
    spec, size = ctx.spec, _size(ctx)
    num_samples = ctx.limited(len(replica.val_set))  # type: ignore[arg-type]
    numbers = share_of(-(-num_samples // size), replica.peers.rank, replica.peers.world_size)[:most]
    if most is not None:
        workers = spec.train.loader.model_copy(
            update={"num_workers": num_stream_workers(ctx, replica.val_set)}
        )
        spec = spec.model_copy(update={"train": spec.train.model_copy(update={"loader": workers})})
    keys = [
        MicroBatch(
            0,
            number,
            np.arange(number * size, min((number + 1) * size, num_samples), dtype=np.int64),
        )
        for number in numbers
    ]
    dataset = KeyedDataset(
        replica.val_set, spec.train.seed, collate_of(replica.task), training=False
    )
    loader = Loader(dataset, keys, spec, ctx.local_world_size, ctx.device)
    try:
        for number, loaded in zip(numbers, loader, strict=True):
            yield number, loaded.batch
    finally:
        loader.close()


def batches_of_whole_pass(ctx: WorkerContext, replica: Replica) -> Generator[tuple[int, Any]]:
    """Read an iterable set whole on every rank, and yield every world-size-th micro-batch."""
    spec, peers = ctx.spec, replica.peers
    collate = collate_of(replica.task)
    whole = WholePass(
        replica.val_set, _size(ctx), peers.rank, peers.world_size, spec.train.seed, collate
    )
    yield from _read(ctx, whole, num_stream_workers(ctx, replica.val_set))


def first_batch(ctx: WorkerContext, replica: Replica, val_set: Any) -> Generator[tuple[int, Any]]:
    """Yield the first micro-batch of an iterable set, the same on every rank. Nothing after it is
    read."""
    first = WholePass(
        val_set, _size(ctx), 0, 1, ctx.spec.train.seed, collate_of(replica.task), most=1
    )
    yield from _read(ctx, first, num_stream_workers(ctx, val_set))


def _read(ctx: WorkerContext, whole: WholePass, num_workers: int) -> Generator[tuple[int, Any]]:
    loaded: Loaded
    for loaded in DataLoader(
        whole, batch_size=None, **loader_options(ctx.spec, num_workers, ctx.device)
    ):
        yield int(loaded.indices[0]), to_device(loaded.batch, ctx.device)


def num_stream_workers(ctx: WorkerContext, val_set: Any) -> int:
    """Return the number of loader processes for data that is read as one stream, or only tried."""
    return min(1, num_loader_workers(ctx.spec, val_set, ctx.local_world_size))


def _size(ctx: WorkerContext) -> int:
    return max(ctx.spec.micro_batch_size, MIN_MICRO_BATCH)
