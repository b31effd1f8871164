"""A user's DataLoader: its parts, the order of its epochs, and the batches that are skipped.

The order of an epoch depends on the run's seed and the epoch alone. Before an epoch's first batch
all generators are seeded that a sampler may draw from, also those that samplers own: on all ranks
alike, or by rank if the loop seeds its ranks differently. So a place in an epoch is two numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from train_fn.errors import BadTask
from train_fn.samples.loader import told_of_epochs
from train_fn.samples.sampler import key, own_generators, seed_anew, seed_building

_ORDER = 7
"""Purpose of the seed of an epoch's order."""
OWN = 9
"""Purpose of the seeds of generators that samplers own."""
_TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"
_DISPATCHER = "DataLoaderDispatcher"
"""Accelerate's loader that reads on rank 0 for all ranks. Its own skipping counts the batches that
rank 0 reads, not those of a rank."""


class BegunElsewhere:
    """A loader whose iterations begin by ``begin``, and that is the loader itself in all other
    respects: for trainers that iterate loaders themselves."""

    def __init__(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._begin = loader, begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_begin"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def kept_iterator(loader: Any) -> str | None:
    """Return the attribute in which a loader keeps an iterator over epochs; None if it has none."""
    for name, value in getattr(loader, "__dict__", {}).items():
        if name != "_iterator" and hasattr(value, "_sampler_iter"):
            return str(name)
    return None


def require_own_iterator(loader: Any) -> None:
    """Raise BadTask for a loader that has one iterator for all epochs, if it reads ahead over their
    ends, or draws there. Its place depends on all that was read before."""
    name = kept_iterator(loader)
    draws = any(
        isinstance(getattr(e, "generator", 0), torch.Generator) for e in samplers_of(loader)
    )
    if name is not None and (draws or getattr(vars(loader)[name], "_num_workers", None)):
        raise BadTask(
            f"es.loader: {type(loader).__name__}.{name} is an iterator that lives on over epochs, "
            "and reads ahead over their ends by loader processes, or draws there from generator=…: "
            "no restart could find its place. Make it in __iter__ (with persistent_workers=True, "
            "processes live on), set num_workers=0 and leave generator out, or use "
            "es.loader(dataset, global_batch_size=…)"
        )


def num_in(loader: Any) -> int | None:
    """Return the batches of an epoch on this rank, or the samples of a data set; None if it does
    not say."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_loader(value: Any) -> bool:
    """Return whether this is a loader of batches, not a data set."""
    return isinstance(value, DataLoader) or hasattr(value, "base_dataloader")


def set_order(loader: Any, seed: int, epoch: int, stream: int = 0, stream_of_own: int = 0) -> None:
    """Make the order of an epoch depend on ``seed`` and ``epoch`` alone, on all ranks alike; or on
    ``stream``, too, if that is not 0.

    Args:
        stream_of_own: the same for generators that samplers own.
    """
    more = (stream,) if stream else ()
    seed_building(key(seed, epoch, *more), _ORDER)
    for part in samplers_of(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key(seed, epoch, _ORDER, *more))
    tell_epoch(loader, epoch)
    own = own_generators(samplers_of(loader), of_samplers=True)
    seed_anew(own, key(seed, epoch, OWN, stream_of_own))


def tell_epoch(loader: Any, epoch: int) -> None:
    """Tell samplers, data set and collate function which epoch begins. Loader processes that live
    on over epochs begin anew if they hold something that is told."""
    for part in told_of_epochs(samplers_of(loader)):
        part.set_epoch(epoch)
    roots = (getattr(loader, "dataset", None), getattr(loader, "collate_fn", None))
    read = told_of_epochs(roots)
    for part in read:
        part.set_epoch(epoch)
    if read:
        for part in samplers_of(loader):  # Accelerate's loader holds one
            if isinstance(part, DataLoader) and part.persistent_workers:
                part._iterator = None


def divides(loader: Any) -> bool:
    """Return whether a loader gives each rank its part of one order, which must be the same on all
    ranks."""
    names = ("num_replicas", "world_size", "rank", "num_processes")
    return hasattr(loader, "base_dataloader") or any(
        hasattr(part, name) for part in samplers_of(loader) for name in names
    )


def samplers_of(loader: Any) -> list[Any]:
    """Return the loader, and every loader and sampler that it wraps."""
    found: list[Any] = []
    waiting = [loader]
    while waiting:
        part = waiting.pop()
        if part is not None and not any(part is each for each in found):
            found.append(part)
            names = ("base_dataloader", "batch_sampler", "sampler")
            waiting += [getattr(part, name, None) for name in names]
            # Lightning divides the order of a sampler of the user's own as if it were data.
            held = getattr(getattr(part, "dataset", None), "__dict__", {})
            waiting.append(held.get("_sampler"))
    return found


def after_batches(loader: Any, num_batches: int) -> Any:
    """Return the rest of an epoch without its first batches: as the loader itself yields it.
    torch's own class skips them without loading."""
    if _is_of_accelerate(loader):
        return importlib.import_module("accelerate").skip_first_batches(loader, num_batches)
    if not skips(loader):
        return islice(loader, num_batches, None)
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"]
    names += ["multiprocessing_context", "generator", "prefetch_factor"]
    return DataLoader(
        loader.dataset,
        batch_sampler=_Skipping(loader.batch_sampler, num_batches),
        **{name: getattr(loader, name) for name in names},
    )


def _is_of_accelerate(loader: Any) -> bool:
    kind = type(loader)
    return kind.__module__.startswith("accelerate.") and kind.__name__ != _DISPATCHER


def skips(loader: Any) -> bool:
    """Return whether batches can be left out without loading them. With torch's and torchdata's
    loaders they follow from the sampler alone, and Accelerate has a way of its own."""
    kind = type(loader)
    is_plain = kind is DataLoader or (
        kind.__module__ == _TORCHDATA and not hasattr(loader.dataset, "state_dict")
    )
    return _is_of_accelerate(loader) or (
        is_plain
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


class _Skipping(BatchSampler):
    """The batches of another sampler without its first ones."""

    def __init__(self, sampler: Any, num_batches: int) -> None:
        self._sampler, self._num_batches = sampler, num_batches

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self._sampler), self._num_batches, None)

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._num_batches)
