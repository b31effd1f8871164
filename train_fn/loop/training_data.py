"""The training set of a rank, and the order in which the run goes through it."""

from __future__ import annotations

from typing import Any

from train_fn.context import WorkerContext
from train_fn.samples.loader import KeyedDataset, TrainingData, collate_of
from train_fn.samples.sampler import Sampler, WholeShares
from train_fn.samples.stream_sampler import StreamSampler, num_streams_of
from train_fn.samples.stream_set import StreamSet
from train_fn.tasks.checks import epoch_length, is_iterable, where
from train_fn.tasks.own_step import makes_own_steps
from train_fn.tasks.protocol import Task


def training_data(ctx: WorkerContext, task: Task, dataset: Any) -> tuple[TrainingData, Sampler]:
    """Return the training set, read by index or as streams, and the order of its samples."""
    spec, train = ctx.spec, ctx.spec.train
    if not is_iterable(dataset):
        kind, size = Sampler, spec.micro_batch_size
        if makes_own_steps(task):
            kind, size = WholeShares, -(-train.global_batch_size // ctx.world_size)
        sampler = kind(ctx.limited(len(dataset)), train.global_batch_size, size, train.seed)
        return KeyedDataset(dataset, train.seed, collate_of(task), training=True), sampler
    source = where(task, "build_datasets")
    streams = StreamSampler(
        epoch_length(source, dataset, train),
        train.global_batch_size,
        spec.micro_batch_size,
        train.seed,
        num_streams_of(spec),
    )
    return StreamSet(
        dataset, streams, spec, ctx.local_world_size, collate_of(task), source
    ), streams
