"""``es.loader`` of a DataLoader: it goes on at the very batch, by its own state or by its place in
the epoch.

The order of an epoch depends on the run's seed and the epoch alone: all generators that a sampler
may draw from are seeded before the epoch's first batch, on all ranks alike. So a place in an epoch
is two numbers. What a data set draws itself while it makes a sample is not restored.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from train_fn.errors import BadTask, DataChanged
from train_fn.samples.randomness import key, seed_building

_ORDER = 7
"""Purpose of the seed of an epoch's order."""
_FINISHED = "_iterator_finished"
"""In the state of torchdata's StatefulDataLoader: the epoch has ended."""
_DISPATCHER = "DataLoaderDispatcher"
"""Accelerate's loader that reads on rank 0 for all ranks. Its own skipping counts the batches that
rank 0 reads, not those of a rank."""

logger = logging.getLogger(__name__)


class Followed(Protocol):
    """What the loader uses of a protected loop."""

    rank: int
    world_size: int

    @property
    def seed(self) -> int: ...

    @property
    def step_number(self) -> int: ...

    def holds(self, part: object) -> bool:
        """Return whether this object is part of the state."""

    def reseed(self) -> None: ...


class FollowedLoader:
    """A user's DataLoader whose place is part of the state: pass it as ``es.protect(extra=…)``.

    It is a plain DataLoader, one that Accelerate prepared, or one with ``state_dict`` and
    ``load_state_dict``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_stateful = is_stateful(loader)
        self.epoch = 0
        """The epoch of the newest batch."""
        self._num_batches = 0
        """Batches of this epoch that were yielded."""
        self._world_size = 0
        self._length = _length(loader)
        """Batches of an epoch that the state was trained on; None if that is not known."""
        self._known: dict[str, Any] | None = None
        """The state of a stateful loader to go on from."""

    def __len__(self) -> int:
        """Return the batches of an epoch on this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        raise BadTask("es.loader: iterate data.batches(state), which goes on where the state is")

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the newest batch."""
        return {
            "epoch": self.epoch,
            "num_batches": self._num_batches,
            "world_size": self._world_size,
            "length": _length(self._loader),
            "loader": self._loader.state_dict() if self._is_stateful else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after that batch."""
        self.epoch, self._num_batches = state["epoch"], state["num_batches"]
        self._world_size, self._length = state["world_size"], state.get("length")
        # A run that was forked may have a loader of another kind: it goes on by its place.
        self._known = state["loader"] if self._is_stateful else None

    def batches(
        self, state: Followed, *, epochs: int | None = None, steps: int | None = None
    ) -> Iterator[Any]:
        """Yield this rank's batches from where ``state`` is, without end, or up to that many epochs
        or steps of the whole run.

        Call ``state.step()`` after every batch, or after several whose gradients are accumulated.
        """
        if not state.holds(self):
            raise BadTask(
                "es.loader(DataLoader) is not part of the state; pass it as "
                "es.protect(extra={'data': data})"
            )
        self._require_same_epochs(state)
        self._move_to(state.world_size)
        seeded: int | None = None
        while epochs is None or self.epoch < epochs:
            is_empty = self._num_batches == 0
            for batch in self._rest_of_epoch(state):
                if steps is not None and state.step_number >= steps:
                    return
                is_empty = False
                self._num_batches += 1
                if seeded != state.step_number:
                    # The loader may have drawn; what the step draws depends on its number alone.
                    seeded = state.step_number
                    state.reseed()
                yield batch
            if is_empty:
                raise BadTask("es.loader: the DataLoader yields no batch")
            if steps is not None and state.step_number >= steps:
                return
            self.epoch, self._num_batches = self.epoch + 1, 0

    def _require_same_epochs(self, state: Followed) -> None:
        """Raise DataChanged if this rank's place is one in other data: of a run that was forked, or
        whose data set was changed. Its end of an epoch is one of any data."""
        length, known = _length(self._loader), self._length
        if state.world_size != self._world_size or known is None or length in (None, known):
            return
        if self._num_batches not in (0, known):
            raise DataChanged(
                f"es.loader: the DataLoader has {length} batches an epoch, but the state of step "
                f"{state.step_number} is after batch {self._num_batches} of {known}. Put the data "
                "back as it was, begin from a checkpoint of an epoch's end, or start a new run"
            )
        if self._num_batches:
            self.epoch, self._num_batches, self._known = self.epoch + 1, 0, None
        self._length = length

    def _move_to(self, world_size: int) -> None:
        """Go on at another world size: at the same number of batches of all ranks."""
        if self._world_size not in (0, world_size) and self._num_batches:
            done = self._num_batches * self._world_size
            self._num_batches, repeated = divmod(done, world_size)
            self._known = None
            logger.warning(
                "the number of ranks changed from %d to %d: the loader goes on after %d batches "
                "of each rank; up to %d batches are used again",
                self._world_size,
                world_size,
                self._num_batches,
                repeated,
            )
        self._world_size = world_size

    def _rest_of_epoch(self, state: Followed) -> Iterator[Any]:
        known, self._known = self._known, None
        loader, num_done = self._loader, self._num_batches
        if known is not None and known.get(_FINISHED) and num_done:
            return
        for part in samplers_of(loader):
            if hasattr(part, "initial_seed"):  # of Accelerate's sampler, which adds the epoch
                part.initial_seed = state.seed >> 1
        set_order(loader, state.seed, self.epoch)
        if known is not None:
            loader.load_state_dict(known)
        elif num_done:
            loader = after_batches(loader, num_done)
        yield from loader


def _length(loader: Any) -> int | None:
    """Return the batches of an epoch on this rank; None if the loader does not say."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_loader(value: Any) -> bool:
    """Return whether this is a loader of batches, not a data set."""
    return isinstance(value, DataLoader) or hasattr(value, "base_dataloader")


def is_stateful(loader: Any) -> bool:
    """Return whether a loader restores its place itself."""
    # Accelerate's loaders have the methods whether or not what they hold has a state.
    inner = getattr(loader, "base_dataloader", loader)
    return hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")


def set_order(loader: Any, seed: int, epoch: int) -> None:
    """Make the order of an epoch depend on ``seed`` and ``epoch`` alone, on all ranks alike."""
    seed_building(key(seed, epoch), _ORDER)
    for part in samplers_of(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key(seed, epoch, _ORDER))
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    if hasattr(getattr(loader, "dataset", None), "set_epoch"):
        loader.dataset.set_epoch(epoch)


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
    return found


def after_batches(loader: Any, num_batches: int) -> Any:
    """Return the rest of an epoch without its first batches."""
    if type(loader).__name__ == _DISPATCHER:
        return islice(loader, num_batches, None)
    if type(loader).__module__.startswith("accelerate."):
        return importlib.import_module("accelerate").skip_first_batches(loader, num_batches)
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or sampler is None:
        return islice(loader, num_batches, None)
    if isinstance(loader.dataset, IterableDataset):
        return islice(loader, num_batches, None)
    names = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
    )
    return DataLoader(
        loader.dataset,
        batch_sampler=_Skipping(sampler, num_batches),
        **{name: getattr(loader, name) for name in names},
    )


class _Skipping(BatchSampler):
    """The batches of another sampler without its first ones."""

    def __init__(self, sampler: Any, num_batches: int) -> None:
        self._sampler, self._num_batches = sampler, num_batches

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self._sampler), self._num_batches, None)

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._num_batches)
