"""Read iterable data sets stream by stream, with bookmarks from which a later attempt resumes at
the exact sample.

The convention is that of torchdata's StatefulDataLoader: a data set, or its iterator, may have
``state_dict()`` and ``load_state_dict(state)``. A bookmark is such a state with the number of
samples before it. Samples between the bookmark and the first one needed are read and dropped.

Bookmarks are taken every few steps, and leave the loader process with their micro-batch. Ranks
exchange them, so that every rank has those of all streams and a dead rank loses none.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from everstep.spec.run_spec import RunSpec
from train_fn.errors import BadTask
from train_fn.recovery.error_text import ended_program
from train_fn.samples.loader import Collate, Loaded, loader_options, num_loader_workers
from train_fn.samples.randomness import key, seed_sample
from train_fn.samples.sampler import MicroBatch
from train_fn.samples.stream_sampler import StreamSampler

BOOKMARK_STEPS = 20
"""Steps from one bookmark to the next."""
_PURPOSE = 7
"""Separates the random numbers for samples of streams from those for other samples."""
_NOTHING = object()


class Bookmark(NamedTuple):
    """Describe a position in a stream."""

    ordinal: int
    """Number of the stream's samples before it."""
    pass_began: int
    """Number of those samples that precede the current pass over the data."""
    state: bytes | None
    """State of the data set and its iterator; None if they have no ``state_dict``."""


class Bookmarks:
    """Hold the newest bookmark of every stream that this rank knows, as part of the training
    state."""

    def __init__(self) -> None:
        self.newest: dict[int, Bookmark] = {}
        self._passed: dict[int, Bookmark] = {}

    def note(self, loaded: Loaded) -> None:
        """Note the bookmark of a micro-batch that the loader returned, if it has one."""
        if loaded.place is not None:
            stream, bookmark = loaded.place
            self._passed[stream] = bookmark

    def exchange(self, step: int, gather: Callable[[Any], list[Any]]) -> None:
        """Share the passed bookmarks with all ranks, once every BOOKMARK_STEPS steps. All ranks
        call this after a step was committed."""
        if step % BOOKMARK_STEPS == 0:
            for passed in gather(self._passed):
                self.newest.update(passed)
            self._passed = {}

    def state_dict(self) -> dict[str, Any]:
        return {str(stream): list(bookmark) for stream, bookmark in self.newest.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.newest = {int(stream): Bookmark(*values) for stream, values in state.items()}
        self._passed = {}


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
        self.dataset, self.sampler, self.collate, self.source = dataset, sampler, collate, source
        self.seed = key(spec.train.seed, _PURPOSE)
        self.bookmarks = Bookmarks()
        self._spec, self._local_world_size = spec, local_world_size

    @property
    def fingerprint(self) -> str:
        """Return the data set's own fingerprint, or else its class, and the number of streams."""
        told = getattr(self.dataset, "fingerprint", None) or type(self.dataset).__qualname__
        return f"{told}/{self.sampler.num_streams} streams"

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
                "where __iter__ draws from nothing "
                "but the global random generators, and slower than with state_dict and "
                "load_state_dict"
            )
        alike = ""
        if len(begun) == 2 and _equal(begun[0].batch, begun[1].batch):
            alike = (
                " WARNING: streams 0 and 1 begin with the same samples, so that samples seem to "
                "be used several times: divide them "
                "by torch.utils.data.get_worker_info() in __iter__"
            )
        return (
            f"Iterable data, read as {self.sampler.num_streams} streams. At the same world size a "
            "restart goes on in each of them "
            f"at the very sample, {how}. At another world size streams move to other ranks and "
            "global batches stay the same, "
            "provided that the data set divides itself by torch.utils.data.get_worker_info() "
            "alone, and not by rank. The ledger "
            "proves that no place of a stream was skipped or used twice; whether all streams "
            "together hold every sample once, and "
            f"in which order, is up to the data set.{alike}"
        )

    def first(self, micro: MicroBatch) -> Loaded:
        reader = _Reader(self, micro, None, always=True)
        with closing(self._loaded_by(reader, torch.device("cpu"))) as loaded:
            return next(loaded)

    def batches(
        self,
        micro_batches: Iterable[MicroBatch],
        spec: RunSpec,
        local_world_size: int,
        device: torch.device,
    ) -> Iterator[Loaded]:
        readers: dict[int, Iterator[Loaded]] = {}
        for micro in micro_batches:
            stream = self.sampler.stream_of(micro)
            if stream not in readers:
                readers[stream] = self._loaded_by(
                    _Reader(self, micro, self.bookmarks.newest.get(stream)), device
                )
            yield next(readers[stream])

    def _loaded_by(self, reader: _Reader, device: torch.device) -> Generator[Loaded]:
        """Yield what a reader reads, in its own process if the spec has loader processes."""
        num_workers = min(1, num_loader_workers(self._spec, self.dataset, self._local_world_size))
        options = loader_options(self._spec, num_workers, device, f"stream {reader.stream}, loader")
        yield from DataLoader(reader, batch_size=None, **options)


class _Reader(IterableDataset[Loaded]):
    """Yield the micro-batches of one stream from ``first`` on, without end. With ``always``, each
    has a bookmark."""

    def __init__(
        self,
        owner: StreamSet,
        first: MicroBatch,
        bookmark: Bookmark | None,
        *,
        always: bool = False,
    ) -> None:
        self._owner, self._first, self._bookmark, self._always = owner, first, bookmark, always

    @property
    def stream(self) -> int:
        return self._owner.sampler.stream_of(self._first)

    def __iter__(self) -> Iterator[Loaded]:
        owner, sampler, stream = self._owner, self._owner.sampler, self.stream
        dataset = owner.dataset if get_worker_info() is not None else _copied(owner)
        samples = _Samples(owner, dataset, stream)
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
                    batch = owner.collate([samples.read() for _ in micro.indices])
                    step = micro.epoch * sampler.steps_per_epoch + micro.k + 1
                    if self._always or (micro is micros[-1] and step % BOOKMARK_STEPS == 0):
                        place = (stream, samples.bookmark())
                yield Loaded(indices, batch, place)


class _Samples:
    """Read the samples of one stream, pass after pass. A sample's random numbers depend on its
    ordinal, so they are the same after a restart."""

    def __init__(self, owner: StreamSet, dataset: Any, stream: int) -> None:
        self._owner, self._dataset, self._stream = owner, dataset, stream
        self._iterator: Iterator[Any] = iter(())
        self.ordinal = self._pass_began = 0

    @contextmanager
    def in_stream(self) -> Iterator[None]:
        """Make ``get_worker_info`` return loader process ``stream`` of ``num_streams`` inside the
        block."""
        with _as_worker(
            self._stream, self._owner.sampler.num_streams, self._owner.seed, self._dataset
        ):
            yield

    def open(self, bookmark: Bookmark | None, ordinal: int) -> None:
        """Advance until ``ordinal`` is the next sample, from an earlier bookmark if there is
        one."""
        state: dict[str, Any] = {}
        if bookmark is not None:
            self._pass_began = bookmark.pass_began
            self.ordinal = bookmark.ordinal if bookmark.state is not None else bookmark.pass_began
            state = _unpacked(bookmark.state) if bookmark.state is not None else {}
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
        if sample is _NOTHING:
            self._pass_began = self.ordinal
            self._begin_pass()
            sample = self._next()
        if sample is _NOTHING:
            raise BadTask(
                f"{self._owner.source}: train gives no sample to stream {self._stream} of "
                f"{self._owner.sampler.num_streams} after "
                f"{self.ordinal} samples; its __iter__ must give some to every "
                "torch.utils.data.get_worker_info().id, and begin "
                "anew whenever it is called after its end. Fewer streams: lower "
                "scaling.max_workers or train.loader.num_workers"
            )
        self.ordinal += 1
        return sample

    def bookmark(self) -> Bookmark:
        state = {}
        if self._iterator is not self._dataset and hasattr(self._dataset, "state_dict"):
            state["dataset"] = self._dataset.state_dict()
        if hasattr(self._iterator, "state_dict"):
            state["iterator"] = self._iterator.state_dict()
        return Bookmark(
            self.ordinal, self._pass_began, _packed(self._owner.source, state) if state else None
        )

    def _next(self) -> Any:
        seed_sample(self._owner.seed, self._stream, self.ordinal)
        try:
            return next(self._iterator, _NOTHING)
        except SystemExit as exc:  # would end a loader process without a word
            raise ended_program(
                f"sample {self.ordinal} of stream {self._stream} cannot be read", exc
            ) from exc

    def _begin_pass(self) -> None:
        seed_sample(self._owner.seed, self._stream, self._pass_began)
        self._iterator = iter(self._dataset)


@contextmanager
def _as_worker(number: int, num_workers: int, seed: int, dataset: Any) -> Iterator[None]:
    """Make ``get_worker_info`` return loader process ``number`` of ``num_workers`` inside the
    block."""
    before = torch_worker._worker_info
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=seed, dataset=dataset
    )
    try:
        yield
    finally:
        torch_worker._worker_info = before


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
        as_worker = (
            partial(_as_worker, 0, 1, self._seed, self._dataset)
            if torch_worker._worker_info is None
            else nullcontext
        )
        with as_worker():
            seed_sample(self._seed, 0, 0)
            samples = iter(self._dataset)
        while True:
            with as_worker():
                sample = next(samples, _NOTHING)
            if sample is _NOTHING:
                return
            yield sample


def _copied(owner: StreamSet) -> Any:
    """Return a copy of the data set for a stream that this process reads. A loader process would
    have its own copy, too."""
    try:
        return copy.deepcopy(owner.dataset)
    except Exception as exc:
        raise BadTask(
            f"{owner.source}: train ({type(owner.dataset).__name__}) cannot be copied for each of "
            f"its streams ({exc}); open files "
            "and connections in __iter__, or set train.loader.num_workers to 1"
        ) from exc


def _packed(source: str, state: dict[str, Any]) -> bytes:
    """A state as bytes that a checkpoint can hold, and that run no code when they are read back."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        _unpacked(buffer.getvalue())
    except Exception as exc:
        raise BadTask(
            f"{source}: the state_dict of train cannot be kept, for {state!r:.200} holds more "
            "than numbers, strings, lists, "
            "tuples, dicts and tensors; of a numpy array keep .tolist()"
        ) from exc
    return buffer.getvalue()


def _unpacked(data: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


def _equal(one: Any, other: Any) -> bool:
    """Whether two batches hold the same."""
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
