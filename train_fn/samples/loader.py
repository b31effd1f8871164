"""Samples on their way to the device: this rank's micro-batches as one stream over all epochs."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from everstep.spec.run_spec import RunSpec
from train_fn.journal.rank_log import mark_output
from train_fn.recovery.error_text import ended_program
from train_fn.samples.sampler import (
    IndexArray,
    MicroBatch,
    key,
    own_generators,
    seed_anew,
    seed_sample,
)

Collate = Callable[[list[Any]], Any]
MAX_AUTO_WORKERS = 16
_PR_SET_PDEATHSIG = 1
_MOST_DEPTH = 8
_COLLATES = 9
"""Purpose of the seeds of generators that data and a collate function own."""


class Loaded(NamedTuple):
    """A micro-batch from the loader."""

    indices: IndexArray
    """Indices of the samples that were really read, in order."""
    batch: Any
    place: Any = None
    """Of iterable data, for some micro-batches: the stream's position after this one."""


class TrainingData(Protocol):
    """Define what the loop uses of a training set."""

    @property
    def fingerprint(self) -> str:
        """Identifies this data. A run is not resumed on other data."""

    def guarantee(self) -> str:
        """Return in words how the samples are used, for the run's user."""

    def first(self, micro: MicroBatch) -> Loaded:
        """Read one micro-batch without the loader."""

    def batches(
        self,
        micro_batches: Iterable[MicroBatch],
        spec: RunSpec,
        local_world_size: int,
        device: torch.device,
    ) -> Iterator[Loaded]:
        """Yield the micro-batches in order, read ahead by loader processes if the spec has any."""


class KeyedDataset(Dataset[Loaded]):
    """Reads micro-batches by (epoch, indices), so that a sample's random transforms depend on
    nothing else. Data with ``set_epoch(epoch)`` is told before it reads the first sample of an
    epoch.

    A data set with ``fetch(seed, epoch, indices) -> batch`` reads whole micro-batches. For any
    other one the global generators and those that the data own are seeded before each sample.
    """

    def __init__(self, dataset: Any, seed: int, collate: Collate, *, training: bool) -> None:
        self.dataset, self.seed, self.collate, self.training = dataset, seed, collate, training
        self._epochs = ToldEpoch(dataset, collate)
        self._drawn_from = own_generators([collate])
        self._drawn_by_data = own_generators([dataset])

    def __getitems__(self, micro: MicroBatch) -> Loaded:
        if self.training:
            self._epochs.begin(micro.epoch)
        if hasattr(self.dataset, "fetch"):
            return Loaded(
                micro.indices,
                self.dataset.fetch(
                    self.seed, micro.epoch if self.training else None, micro.indices
                ),
            )
        samples, fetched = [], []
        for index in micro.indices.tolist():
            seed_sample(self.seed, micro.epoch, index)
            if self._drawn_by_data:
                seed_anew(self._drawn_by_data, key(self.seed, micro.epoch, index, _COLLATES))
            try:
                samples.append(self.dataset[index])
            except SystemExit as exc:  # would end a loader process silently
                raise ended_program(f"sample {index} cannot be read", exc) from exc
            fetched.append(index)
        if self._drawn_from:
            place = (self.seed, micro.epoch, micro.k, micro.number)
            seed_anew(self._drawn_from, key(*place, _COLLATES))
        return Loaded(np.array(fetched, dtype=np.int64), self.collate(samples))

    @property
    def fingerprint(self) -> str:
        """Return the data set's own fingerprint, or else its class and length."""
        own = getattr(self.dataset, "fingerprint", None)
        return str(own or f"{type(self.dataset).__qualname__}/{len(self.dataset)}")

    def guarantee(self) -> str:
        return (
            "Every sample of an epoch is used exactly once, whatever dies and at any world size; "
            "a count of all of them proves it."
        )

    def first(self, micro: MicroBatch) -> Loaded:
        try:
            with left_as_built([self.dataset]):
                return self.__getitems__(micro)
        finally:
            self._epochs.forget()  # what it said is undone

    def batches(
        self,
        micro_batches: Iterable[MicroBatch],
        spec: RunSpec,
        local_world_size: int,
        device: torch.device,
    ) -> Iterator[Loaded]:
        options = loader_options(
            spec, num_loader_workers(spec, self.dataset, local_world_size), device
        )
        return iter(DataLoader(self, batch_sampler=micro_batches, **options))  # type: ignore[arg-type]  # keys, which __getitems__ takes whole


class Loader(Iterator[Loaded]):
    """Iterates over ``micro_batches`` of a data set. Copies to the device run while it computes."""

    def __init__(
        self,
        dataset: TrainingData,
        micro_batches: Iterable[MicroBatch],
        spec: RunSpec,
        local_world_size: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._iterator: Iterator[Loaded] | None = dataset.batches(
            micro_batches, spec, local_world_size, device
        )
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._ahead: Loaded | Exception | None = None
        self._waited_s = 0.0
        self._idle: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Marks on the device: when it had no more to do, and when the next micro-batch was there.
        """

    def __next__(self) -> Loaded:
        """Return the next micro-batch; its copy to the device may still run."""
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        began = time.perf_counter()
        loaded = ahead or self._load()
        if self._copies is None:
            self._waited_s += time.perf_counter() - began
        else:
            computing = torch.cuda.current_stream(self._device)
            # Raises what broke the device, before the last micro-batch is freed: torch would end
            # the process that frees it (``node/device.py``).
            computing.query()
            computing.wait_stream(self._copies)
            for tensor in tensors_in(loaded.batch):
                # Its memory must not be reused before the step has read it.
                tensor.record_stream(computing)
        return loaded

    def prefetch(self) -> None:
        """On CUDA, begin to copy the next micro-batch while the device computes. An error is raised
        by the ``next`` that it belongs to."""
        if self._copies is None or self._ahead is not None:
            return
        had_done = _mark_on(torch.cuda.current_stream(self._device))
        try:
            self._ahead = self._load()
        except Exception as exc:
            self._ahead = exc
        self._idle = had_done, _mark_on(self._copies)

    def take_wait_s(self) -> float:
        """Return how long a step waited for data since the last call. On CUDA that is how long the
        device had nothing to do before the step's first micro-batch was there."""
        waited_s, self._waited_s = self._waited_s, 0.0
        if self._idle is not None and all(mark.query() for mark in self._idle):  # type: ignore[no-untyped-call]
            had_done, was_there = self._idle
            waited_s += max(0.0, had_done.elapsed_time(was_there) / 1000)
        self._idle = None
        return waited_s

    def _load(self) -> Loaded:
        assert self._iterator is not None
        loaded = next(self._iterator)
        if self._copies is None:
            return loaded
        with torch.cuda.stream(self._copies):
            return loaded._replace(batch=to_device(loaded.batch, self._device))

    @property
    def processes(self) -> list[int]:
        """Return the ids of the loader's processes."""
        return [each.pid for part in self._parts for each in getattr(part, "_workers", ())]

    @property
    def threads(self) -> list[int | None]:
        """Return the ids of the threads that feed them."""
        queues = [each for part in self._parts for each in getattr(part, "_index_queues", ())]
        return [each._thread.ident for each in queues if each._thread is not None]

    @property
    def _parts(self) -> Iterable[Any]:
        """Return torch's iterators: one, or one for each stream of iterable data."""
        return getattr(self._iterator, "parts", {0: self._iterator}).values()

    def close(self) -> None:
        """End the loader's processes."""
        self._iterator = self._ahead = None


def _mark_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    return stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call, no-any-return]


def begin_loader_process(name: str, number: int) -> None:
    """Set up a loader process: mark its output, and let the kernel end it when the rank's thread
    that started it ends.

    By itself it would notice seconds later and keep its memory until then. A stopped process would
    never notice.
    """
    mark_output(f"{name} {number}")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def loader_options(
    spec: RunSpec, num_workers: int, device: torch.device, name: str = "loader"
) -> dict[str, Any]:
    """Return the arguments of torch's DataLoader. It has its own generator, which does not depend
    on how the global one is seeded.

    ``name`` and its number mark the output of a loader process.
    """
    return {
        "collate_fn": taken_as_is,
        "worker_init_fn": partial(begin_loader_process, name),
        "num_workers": num_workers,
        "prefetch_factor": spec.train.loader.prefetch_factor if num_workers else None,
        "pin_memory": device.type == "cuda",
        "generator": torch.Generator().manual_seed(key(spec.train.seed, 4)),
    }


def taken_as_is(loaded: Any) -> Any:
    return loaded


def num_loader_workers(spec: RunSpec, dataset: Any, local_world_size: int) -> int:
    """Return the number of this rank's loader processes. ``auto`` is 0 for data in memory, else the
    rank's cores."""
    asked = spec.train.loader.num_workers
    if asked != "auto":
        return asked
    if getattr(dataset, "in_memory", False):
        return 0
    available = len(os.sched_getaffinity(0)) // local_world_size
    return max(
        1, min(int(spec.scaling.resources_per_worker.get("CPU", 1)), available, MAX_AUTO_WORKERS)
    )


def collate_of(task: Any) -> Collate:
    """Return the task's own ``collate``, else torch's."""
    return getattr(task, "collate", None) or default_collate


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with every tensor in it moved: in tuples, lists, mappings and dataclasses,
    and in objects that have ``to``, as PackedSequence or a tokenizer's BatchEncoding."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if _moves_itself(batch):
        return _moved(batch, device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    if isinstance(batch, MutableMapping):
        copied: Any = copy.copy(batch)
        for name, value in batch.items():
            copied[name] = to_device(value, device)
        return copied
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        copied = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):  # also of a frozen one
                value = to_device(getattr(batch, field.name), device)
                object.__setattr__(copied, field.name, value)
        return copied
    return batch


def _moves_itself(batch: Any) -> bool:
    return not isinstance(batch, type) and callable(getattr(type(batch), "to", None))


def _moved(batch: Any, device: torch.device) -> Any:
    """Return what ``batch.to`` does; the batch itself if that moves it in place."""
    try:
        moved = batch.to(device, non_blocking=True)
    except TypeError:  # it takes a device alone
        moved = batch.to(device)
    return batch if moved is None else moved


def tensors_in(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield every tensor that ``to_device`` moves."""
    values: Iterable[Any] = ()
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth == _MOST_DEPTH or isinstance(batch, str | bytes | type):
        return
    elif isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, list | tuple):
        values = batch
    elif dataclasses.is_dataclass(batch):
        values = (getattr(batch, each.name, None) for each in dataclasses.fields(batch))
    elif _moves_itself(batch):
        values = vars(batch).values() if hasattr(batch, "__dict__") else ()
    for value in values:
        yield from tensors_in(value, depth + 1)


# ---------------------------------------------------------------- worker info

# Set what ``torch.utils.data.get_worker_info`` returns, by which iterable data sets choose their
# part of the samples.


@contextmanager
def as_worker(number: int, num_workers: int, seed: int, dataset: Any) -> Iterator[None]:
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


# ---------------------------------------------------------------- as built

# Read a few samples in the rank's own process before loader processes are forked.


@contextmanager
def left_as_built(datasets: Iterable[Any]) -> Iterator[None]:
    """Restore the attributes of data sets, and of data sets inside them, after the block.

    A data set may open a file at its first read. All loader processes would inherit that file and
    share its position, and so read each other's samples.
    """
    seen = set[int]()
    owners = [owner for dataset in datasets for owner in data_sets_in(dataset, seen)]
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in before:
            now = vars(owner)
            for key in [key for key in now if key not in attributes]:
                del now[key]
            now.update(attributes)


def data_sets_in(dataset: Any, seen: set[int]) -> Iterator[Any]:
    """Yield ``dataset`` and the data sets in its attributes and lists. A ``Subset`` holds one."""
    if id(dataset) in seen or not hasattr(dataset, "__dict__"):
        return
    seen.add(id(dataset))
    yield dataset
    for name, value in list(vars(dataset).items()):
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Dataset) or name in ("dataset", "datasets"):
                yield from data_sets_in(each, seen)


# ---------------------------------------------------------------- epoch told

# Tell data which epoch begins: ``set_epoch`` of a data set, of those that it holds, and of what
# makes its batches. It is called in the process that reads.


def told_of_epochs(roots: Iterable[Any]) -> list[Any]:
    """Return what has ``set_epoch`` among these objects, and the data sets inside them."""
    seen: set[int] = set()
    found: list[Any] = []
    for root in roots:
        for each in (root, *data_sets_in(root, seen)):
            is_new = not any(each is other for other in found)
            if is_new and callable(getattr(each, "set_epoch", None)):
                found.append(each)
    return found


class ToldEpoch:
    """Tell data of an epoch when it reads the first sample of it in this process."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._told: list[Any] | None = None
        self._epoch: int | None = None

    def begin(self, epoch: int) -> None:
        """Tell the data, if this epoch is not the newest one that it was told of."""
        if epoch == self._epoch:
            return
        if self._told is None:
            self._told = told_of_epochs(self._roots)
        self._epoch = epoch
        for each in self._told:
            each.set_epoch(epoch)

    def forget(self) -> None:
        """Tell the data again before the next sample, whatever epoch it is of."""
        self._epoch = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_told": None, "_epoch": None}


# ---------------------------------------------------------------- whole pass

# Read one pass over an iterable validation set.

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
            if torch_worker._worker_info is not None
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
