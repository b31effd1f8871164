"""Read one pass over an iterable validation set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from train_fn.samples.loader import Collate, Loaded
from train_fn.samples.randomness import seed_sample
from train_fn.samples.worker_info import as_worker, is_in_loader_process

_END = object()


class WholePass(IterableDataset[Loaded]):
    """Yield a rank's batches of one pass over an iterable validation set. Every rank reads the
    whole set and keeps its own batches."""

    def __init__(
        self,
        dataset: Any,
        size: int,
        rank: int,
        world_size: int,
        seed: int,
        collate: Collate,
        most: int | None = None,
    ) -> None:
        """Set up the pass. ``most`` limits the batches of all ranks, and nothing after them is
        read; None reads all."""
        self._dataset, self._size, self._rank, self._world_size = dataset, size, rank, world_size
        self._seed, self._collate, self._most = seed, collate, most

    def __iter__(self) -> Iterator[Loaded]:
        for number, samples in enumerate(islice(self._chunks(), self._most)):
            if number % self._world_size == self._rank:
                yield Loaded(np.array([number]), self._collate(samples))

    def _chunks(self) -> Iterator[list[Any]]:
        samples = []
        for ordinal, sample in enumerate(self._samples()):
            samples.append(sample)
            if len(samples) == self._size:
                yield samples
                samples = []
            seed_sample(self._seed, 0, ordinal + 1)
        if samples:
            yield samples

    def _samples(self) -> Iterator[Any]:
        """Yield all samples. In this process too, ``get_worker_info`` returns a single loader
        process, since data sets use it to choose their part."""
        reading = (
            nullcontext
            if is_in_loader_process()
            else partial(as_worker, 0, 1, self._seed, self._dataset)
        )
        with reading():
            seed_sample(self._seed, 0, 0)
            samples = iter(self._dataset)
        while True:
            with reading():
                sample = next(samples, _END)
            if sample is _END:
                return
            yield sample
