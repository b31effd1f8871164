"""Read an iterable training set as a fixed number of streams, whatever the world size."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from everstep.spec.run_spec import RunSpec
from train_fn.samples.bookmarks import Bookmarks
from train_fn.samples.loader import Collate, Loaded, loader_options, num_loader_workers
from train_fn.samples.randomness import key
from train_fn.samples.sampler import MicroBatch
from train_fn.samples.stream_reader import StreamReader, Streams
from train_fn.samples.stream_sampler import StreamSampler

_PURPOSE = 7
"""Separates the random numbers for samples of streams from those for other samples."""


class StreamSet:
    """Read an iterable training set."""

    def __init__(
        self,
        dataset: Any,
        sampler: StreamSampler,
        spec: RunSpec,
        local_world_size: int,
        collate: Collate,
        source: str,
    ) -> None:
        """Wrap a data set. ``source`` names the method that built it, for errors."""
        self.dataset, self.sampler = dataset, sampler
        seed = key(spec.train.seed, _PURPOSE)
        self._streams = Streams(dataset, sampler, collate, seed, source)
        self.bookmarks = Bookmarks()
        self._spec, self._local_world_size = spec, local_world_size

    @property
    def fingerprint(self) -> str:
        """Return the data set's own fingerprint, or else its class, and the number of streams."""
        name = getattr(self.dataset, "fingerprint", None) or type(self.dataset).__qualname__
        return f"{name}/{self.sampler.num_streams} streams"

    def guarantee(self) -> str:
        """Return in words how the samples are used. Read a few samples to find out what the data
        set supports."""
        first_two = [
            self.sampler.of_stream(stream, 0, 0)[:1]
            for stream in range(min(2, self.sampler.num_streams))
        ]
        # A small data set may leave a stream empty.
        begun = [self.first(micro) for micros in first_two for micro in micros]
        how = "from the state that the data set gives"
        if begun[0].place is None or begun[0].place[1].state is None:
            how = (
                "by reading its pass again and dropping what was used: the same samples only "
                "where __iter__ draws from nothing but the global random generators, and slower "
                "than with state_dict and load_state_dict"
            )
        alike = ""
        if len(begun) == 2 and _equal(begun[0].batch, begun[1].batch):
            alike = (
                " WARNING: streams 0 and 1 begin with the same samples, so that samples seem to "
                "be used several times: divide them by torch.utils.data.get_worker_info() in "
                "__iter__"
            )
        return (
            f"Iterable data, read as {self.sampler.num_streams} streams. At the same world size a "
            f"restart goes on in each of them at the very sample, {how}. At another world size "
            "streams move to other ranks and global batches stay the same, provided that the data "
            "set divides itself by torch.utils.data.get_worker_info() alone, and not by rank. The "
            "ledger proves that no place of a stream was skipped or used twice; whether all "
            "streams together hold every sample once, and in which order, is up to the data set."
            f"{alike}"
        )

    def first(self, micro: MicroBatch) -> Loaded:
        """Read one micro-batch from the beginning of its stream, with a bookmark after it."""
        reader = StreamReader(self._streams, micro, None, always=True)
        with closing(self._loaded_by(reader, torch.device("cpu"))) as loaded:
            return next(loaded)

    def batches(
        self,
        micro_batches: Iterable[MicroBatch],
        spec: RunSpec,
        local_world_size: int,
        device: torch.device,
    ) -> Iterator[Loaded]:
        """Yield the micro-batches in order. Each stream resumes from its newest bookmark."""
        readers: dict[int, Iterator[Loaded]] = {}
        for micro in micro_batches:
            stream = self.sampler.stream_of(micro)
            if stream not in readers:
                bookmark = self.bookmarks.newest.get(stream)
                reader = StreamReader(self._streams, micro, bookmark)
                readers[stream] = self._loaded_by(reader, device)
            yield next(readers[stream])

    def _loaded_by(self, reader: StreamReader, device: torch.device) -> Generator[Loaded]:
        """Yield what a reader reads, in its own process if the spec has loader processes."""
        num_workers = min(1, num_loader_workers(self._spec, self.dataset, self._local_world_size))
        options = loader_options(self._spec, num_workers, device, f"stream {reader.stream}, loader")
        yield from DataLoader(reader, batch_size=None, **options)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two batches hold the same values."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_equal(one[name], other[name]) for name in one)
        )
    if isinstance(one, list | tuple):
        return (
            isinstance(other, list | tuple)
            and len(one) == len(other)
            and all(map(_equal, one, other))
        )
    return bool(np.array_equal(one, other))
