"""Read the micro-batches of one stream of an iterable data set, from a bookmark on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from train_fn.errors import BadTask
from train_fn.recovery.error_text import ended_program
from train_fn.samples.bookmarks import BOOKMARK_STEPS, Bookmark, pack_state, unpack_state
from train_fn.samples.loader import Collate, Loaded
from train_fn.samples.randomness import seed_sample
from train_fn.samples.sampler import MicroBatch
from train_fn.samples.stream_sampler import StreamSampler
from train_fn.samples.worker_info import as_worker

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
        samples = _Samples(streams, dataset, stream)
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
                    batch = streams.collate([samples.read() for _ in micro.indices])
                    step = micro.epoch * sampler.steps_per_epoch + micro.k + 1
                    if self._always or (micro is micros[-1] and step % BOOKMARK_STEPS == 0):
                        place = (stream, samples.bookmark())
                yield Loaded(indices, batch, place)


class _Samples:
    """Read the samples of one stream, pass after pass. A sample's random numbers depend on its
    ordinal, so they are the same after a restart."""

    def __init__(self, streams: Streams, dataset: Any, stream: int) -> None:
        self._streams, self._dataset, self._stream = streams, dataset, stream
        self._iterator: Iterator[Any] = iter(())
        self.ordinal = self._pass_began = 0

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
            self._pass_began = bookmark.pass_began
            self.ordinal = bookmark.ordinal if bookmark.state is not None else bookmark.pass_began
            state = unpack_state(bookmark.state) if bookmark.state is not None else {}
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
            self._pass_began = self.ordinal
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
        )

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
