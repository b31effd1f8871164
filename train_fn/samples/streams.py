"""Iterable data sets: read by all ranks together, each sample once, and again from any place."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten_with_path
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from everstep.spec.run_spec import RunSpec
from train_fn.errors import BadTask
from train_fn.recovery.error_text import ended_program
from train_fn.samples.ledger import BOOKMARK_STEPS, Bookmark, Bookmarks, pack_state, unpack_state
from train_fn.samples.loader import (
    Collate,
    Loaded,
    ToldEpoch,
    as_worker,
    loader_options,
    num_loader_workers,
    told_of_epochs,
)
from train_fn.samples.sampler import IndexArray, MicroBatch, Sampler, key, seed_sample, share_of

_PURPOSE = 7
"""Separates the random numbers for samples of streams from those for other samples."""

logger = logging.getLogger(__name__)


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
        self.streams = Streams(dataset, sampler, collate, seed, source)
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
        told = ""
        if told_of_epochs([self.dataset]):
            told = " set_epoch of the data is called before each pass over them, with its number."
        return (
            f"Iterable data, read as {self.sampler.num_streams} streams. At the same world size a "
            f"restart goes on in each of them at the very sample, {how}. At another world size "
            "streams move to other ranks and global batches stay the same, provided that the data "
            "set divides itself by torch.utils.data.get_worker_info() alone, and not by rank. The "
            "count proves that no place of a stream was skipped or used twice; whether all "
            "streams together hold every sample once, and in which order, is up to the data set."
            f"{told}{alike}"
        )

    def first(self, micro: MicroBatch) -> Loaded:
        """Read one micro-batch from the beginning of its stream, with a bookmark after it."""
        reader = StreamReader(self.streams, micro, None, always=True)
        return next(self.loaded_by(reader, torch.device("cpu")))

    def batches(
        self,
        micro_batches: Iterable[MicroBatch],
        spec: RunSpec,
        local_world_size: int,
        device: torch.device,
    ) -> Iterator[Loaded]:
        """Yield the micro-batches in order. Each stream resumes from its newest bookmark."""
        return _Batches(self, micro_batches, device)

    def loaded_by(self, reader: StreamReader, device: torch.device) -> Iterator[Loaded]:
        """Yield what a reader reads, in its own process if the spec has loader processes."""
        num_workers = min(1, num_loader_workers(self._spec, self.dataset, self._local_world_size))
        options = loader_options(self._spec, num_workers, device, f"stream {reader.stream}, loader")
        return iter(DataLoader(reader, batch_size=None, **options))


class _Batches(Iterator[Loaded]):
    """The micro-batches of one rank, by a DataLoader for each of its streams."""

    def __init__(
        self, data: StreamSet, micro_batches: Iterable[MicroBatch], device: torch.device
    ) -> None:
        self._data, self._micro_batches, self._device = data, iter(micro_batches), device
        self.parts: dict[int, Iterator[Loaded]] = {}
        """What reads each stream."""

    def __next__(self) -> Loaded:
        data, micro = self._data, next(self._micro_batches)
        stream = data.sampler.stream_of(micro)
        if stream not in self.parts:
            reader = StreamReader(data.streams, micro, data.bookmarks.newest.get(stream))
            self.parts[stream] = data.loaded_by(reader, self._device)
        return next(self.parts[stream])


def _equal(one: Any, other: Any) -> bool:
    """Return whether two batches hold the same values."""
    # by path: the keys of a dictionary may come in another order
    values, others = (dict(tree_flatten_with_path(each)[0]) for each in (one, other))
    return values.keys() == others.keys() and all(
        isinstance(others[path], torch.Tensor) and torch.equal(value, others[path])
        if isinstance(value, torch.Tensor)
        else np.array_equal(value, others[path])
        for path, value in values.items()
    )


# ---------------------------------------------------------------- stream sampler

# Choose the samples of each global batch from iterable data, which is read as a fixed number of
# streams at every world size.
#
# Iterable data has no index to permute. Instead it is read as ``num_streams`` streams, each in its
# own order, as the loader processes of one DataLoader would read it. Every micro-batch of a global
# batch has a fixed stream, and a rank runs the micro-batches of whole streams. So another world
# size moves streams to other ranks, but changes no global batch. A stream that ends starts again.


def num_streams_of(spec: RunSpec) -> int:
    """Return the number of streams: one for each loader process at the largest world size, but at
    most one for each micro-batch. It is the same in every attempt."""
    asked = spec.train.loader.num_workers
    processes = asked if isinstance(asked, int) else 1
    num_micro = -(-spec.train.global_batch_size // spec.micro_batch_size)
    return min(num_micro, spec.scaling.max_workers * max(1, processes))


@dataclass(frozen=True)
class StreamSampler(Sampler):
    """Sample iterable data, like ``Sampler``. An index is ``ordinal * num_streams + stream``. The
    ordinal counts the stream's samples over the whole run."""

    num_streams: int = 1

    def global_batch(self, epoch: int, k: int) -> IndexArray:
        return np.concatenate(
            [
                micro.indices
                for stream in range(self.num_streams)
                for micro in self.of_stream(stream, epoch, k)
            ]
        )

    def share(self, epoch: int, k: int, rank: int, world_size: int) -> list[MicroBatch]:
        streams = share_of(self.num_streams, rank, world_size)
        return [micro for stream in streams for micro in self.of_stream(stream, epoch, k)]

    def numbers(self, k: int, rank: int, world_size: int) -> range:
        streams = share_of(self.num_streams, rank, world_size)
        size = self.size_of(k)
        if not streams:
            return range(0)
        return range(self._numbers(streams[0], size).start, self._numbers(streams[-1], size).stop)

    def stream_of(self, micro: MicroBatch) -> int:
        return int(micro.indices[0]) % self.num_streams

    def of_stream(self, stream: int, epoch: int, k: int) -> list[MicroBatch]:
        """Return the micro-batches of a global batch that come from a stream, in order. There may
        be none if the batch is short."""
        size = self.size_of(k)
        full = self._in_batch(stream, self.global_batch_size)
        last = self._in_batch(stream, self.size_of(self.steps_per_epoch - 1))
        ordinal = (epoch * (self.steps_per_epoch - 1) + k) * full + epoch * last
        micros = []
        for number in self._numbers(stream, size):
            length = min(self.micro_batch_size, size - number * self.micro_batch_size)
            indices = (
                np.arange(ordinal, ordinal + length, dtype=np.int64) * self.num_streams + stream
            )
            micros.append(MicroBatch(epoch, number, indices, k))
            ordinal += length
        return micros

    def batches_from(self, first: MicroBatch) -> Iterator[list[MicroBatch]]:
        """Yield a stream's micro-batches for each global batch from that of ``first`` on, without
        end."""
        stream, epoch, k = self.stream_of(first), first.epoch, first.k
        while True:
            yield self.of_stream(stream, epoch, k)
            epoch, k = (epoch, k + 1) if k + 1 < self.steps_per_epoch else (epoch + 1, 0)

    def _numbers(self, stream: int, size: int) -> range:
        return share_of(-(-size // self.micro_batch_size), stream, self.num_streams)

    def _in_batch(self, stream: int, size: int) -> int:
        """Return the number of a stream's samples in a global batch of ``size`` samples."""
        numbers = self._numbers(stream, size)
        return max(
            0,
            min(numbers.stop * self.micro_batch_size, size) - numbers.start * self.micro_batch_size,
        )


# ---------------------------------------------------------------- stream reader

# Read the micro-batches of one stream of an iterable data set, from a bookmark on.

_END = object()


class Streams(NamedTuple):
    """Describe an iterable data set that is read as streams."""

    dataset: Any
    sampler: StreamSampler
    collate: Collate
    seed: int
    """Seeds the random numbers for its samples."""
    source: str
    """The method that built it, for errors."""


class StreamReader(IterableDataset[Loaded]):
    """Yield the micro-batches of one stream from ``first`` on, without end. With ``always``, each
    has a bookmark."""

    def __init__(
        self,
        streams: Streams,
        first: MicroBatch,
        bookmark: Bookmark | None,
        *,
        always: bool = False,
    ) -> None:
        self._streams, self._first = streams, first
        self._bookmark, self._always = bookmark, always

    @property
    def stream(self) -> int:
        """Return the number of the stream."""
        return self._streams.sampler.stream_of(self._first)

    def __iter__(self) -> Iterator[Loaded]:
        streams, sampler, stream = self._streams, self._streams.sampler, self.stream
        dataset = streams.dataset if get_worker_info() is not None else _copied(streams)
        samples, collates = _Samples(streams, dataset, stream), ToldEpoch(streams.collate)
        with samples.in_stream():
            samples.open(self._bookmark, int(self._first.indices[0]) // sampler.num_streams)
        for micros in sampler.batches_from(self._first):
            for micro in micros:
                place = None
                with samples.in_stream():
                    indices = (
                        np.arange(samples.ordinal, samples.ordinal + len(micro.indices))
                        * sampler.num_streams
                        + stream
                    )
                    samples.begin_epoch(micro.epoch)
                    read = [samples.read() for _ in micro.indices]
                    collates.begin(micro.epoch)
                    batch = streams.collate(read)
                    step = micro.epoch * sampler.steps_per_epoch + micro.k + 1
                    if self._always or (micro is micros[-1] and step % BOOKMARK_STEPS == 0):
                        place = (stream, samples.bookmark())
                yield Loaded(indices, batch, place)


class _Samples:
    """Read the samples of one stream, pass after pass. A sample's random numbers depend on its
    ordinal, so they are the same after a restart. The data is told of the number of each pass
    before it begins, as a loop calls ``set_epoch`` before it iterates its data."""

    def __init__(self, streams: Streams, dataset: Any, stream: int) -> None:
        self._streams, self._dataset, self._stream = streams, dataset, stream
        self._iterator: Iterator[Any] = iter(())
        self.ordinal = self._pass_began = self._pass_number = 0
        self._told: list[Any] = told_of_epochs([dataset])
        self._is_warned = False

    @contextmanager
    def in_stream(self) -> Iterator[None]:
        """Make ``get_worker_info`` return loader process ``stream`` of ``num_streams`` inside the
        block."""
        with as_worker(
            self._stream, self._streams.sampler.num_streams, self._streams.seed, self._dataset
        ):
            yield

    def open(self, bookmark: Bookmark | None, ordinal: int) -> None:
        """Advance until ``ordinal`` is the next sample, from an earlier bookmark if there is
        one."""
        state: dict[str, Any] = {}
        if bookmark is not None:
            self._pass_began, self._pass_number = bookmark.pass_began, bookmark.pass_number
            self.ordinal = bookmark.ordinal if bookmark.state is not None else bookmark.pass_began
            state = unpack_state(bookmark.state) if bookmark.state is not None else {}
        self._tell()  # before the state, which may be that of the pass
        if "dataset" in state:
            self._dataset.load_state_dict(state["dataset"])
        self._begin_pass()
        if "iterator" in state:
            self._iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
        assert self.ordinal <= ordinal
        while self.ordinal < ordinal:
            self.read()

    def read(self) -> Any:
        """Return the next sample. Start a new pass after the last one. Raise BadTask if a new pass
        has no sample."""
        sample = self._next()
        if sample is _END:
            self._pass_began, self._pass_number = self.ordinal, self._pass_number + 1
            self._tell()
            self._begin_pass()
            sample = self._next()
        if sample is _END:
            raise BadTask(
                f"{self._streams.source}: train gives no sample to stream {self._stream} of "
                f"{self._streams.sampler.num_streams} after {self.ordinal} samples; its __iter__ "
                "must give some to every torch.utils.data.get_worker_info().id, and begin anew "
                "whenever it is called after its end. Fewer streams: lower scaling.max_workers or "
                "train.loader.num_workers"
            )
        self.ordinal += 1
        return sample

    def bookmark(self) -> Bookmark:
        """Return the current position. Raise BadTask if the data set's state cannot be saved."""
        state = {}
        if self._iterator is not self._dataset and hasattr(self._dataset, "state_dict"):
            state["dataset"] = self._dataset.state_dict()
        if hasattr(self._iterator, "state_dict"):
            state["iterator"] = self._iterator.state_dict()
        return Bookmark(
            self.ordinal,
            self._pass_began,
            pack_state(self._streams.source, state) if state else None,
            self._pass_number,
        )

    def begin_epoch(self, epoch: int) -> None:
        """Warn once if data that is told of passes does not make one an epoch."""
        if self._told and not self._is_warned and abs(epoch - self._pass_number) > 1:
            self._is_warned = True
            logger.warning(
                "%s: set_epoch of train is called before each pass over the data, and stream %d is "
                "in pass %d where epoch %d begins. Give train a __len__ of what its streams yield "
                "together in one pass, or take the epoch from the parameter epoch of loss",
                *(self._streams.source, self._stream, self._pass_number, epoch),
            )

    def _tell(self) -> None:
        for each in self._told:
            each.set_epoch(self._pass_number)

    def _next(self) -> Any:
        seed_sample(self._streams.seed, self._stream, self.ordinal)
        try:
            return next(self._iterator, _END)
        except SystemExit as exc:  # would end a loader process silently
            raise ended_program(
                f"sample {self.ordinal} of stream {self._stream} cannot be read", exc
            ) from exc

    def _begin_pass(self) -> None:
        seed_sample(self._streams.seed, self._stream, self._pass_began)
        self._iterator = iter(self._dataset)


def _copied(streams: Streams) -> Any:
    """Return a copy of the data set for a stream that this process reads. A loader process would
    have its own copy, too."""
    try:
        return copy.deepcopy(streams.dataset)
    except Exception as exc:
        raise BadTask(
            f"{streams.source}: train ({type(streams.dataset).__name__}) cannot be copied for each "
            f"of its streams ({exc}); open files and connections in __iter__, or set "
            "train.loader.num_workers to 1"
        ) from exc
