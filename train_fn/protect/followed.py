"""``es.loader`` of a DataLoader: it goes on at the very batch, by its place in the epoch.

The order of an epoch depends on the run's seed and the epoch alone: all generators that a sampler
may draw from are seeded before the epoch's first batch, on all ranks alike, or on each by its rank
if the loop seeds its ranks differently. That includes generators that samplers own. So a place in
an epoch is two numbers. A loader is replayed by its own iterator; torch's own class skips
without loading. The last batch is read again and compared. A state that a loader has of its own is
not used: it is that of one rank, which others may not share.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from train_fn import own_loop
from train_fn.errors import BadTask, DataChanged
from train_fn.protect.batches import Taken, differing
from train_fn.samples.loader import (
    data_sets_in,
    digest_of,
    own_generators,
    seed_anew,
    told_of_epochs,
)
from train_fn.samples.sampler import key, seed_building

_ORDER = 7
"""Purpose of the seed of an epoch's order."""
_OWN = 9
"""Purpose of the seeds of generators that samplers own."""
_TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"
_DISPATCHER = "DataLoaderDispatcher"
"""Accelerate's loader that reads on rank 0 for all ranks. Its own skipping counts the batches that
rank 0 reads, not those of a rank."""

_END = object()
_LEAD = 2
"""Batches that are read before the last one when it is compared: as many as have their seeds."""
_LEADS_AGAIN = (0, 1, 3)
"""Of further readings: at other places of an iteration, by other loader processes."""

logger = logging.getLogger(__name__)


class Resumed(Protocol):
    """What reading again uses of a protected loop."""

    @property
    def step_number(self) -> int: ...

    def reseed(self, step: int | None = None) -> None: ...

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value. A collective."""


class Followed(Resumed, Protocol):
    """What the loader uses of a protected loop."""

    rank: int
    world_size: int

    @property
    def seed(self) -> int: ...

    @property
    def seeds_differ(self) -> bool:
        """Return whether the loop seeded its ranks differently when it began."""

    @property
    def draws_differ(self) -> bool:
        """Return whether generators that its samplers own had other states on other ranks when it
        began."""

    def holds(self, part: object) -> bool:
        """Return whether this object is part of the state."""

    def begin_step(self) -> None:
        """Take what the loop has done since its last commit as part of it."""


class FollowedLoader:
    """A user's DataLoader whose place is part of the state: pass it as ``es.protect(extra=…)``.

    It is a plain DataLoader, one that Accelerate prepared, or one of any other kind.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.epoch = 0
        """The epoch of the newest batch."""
        self._num_batches = 0
        """Batches of this epoch that were yielded."""
        self._world_size = 0
        self._length = _length(loader)
        """Batches of an epoch that the state was trained on; None if that is not known."""
        self._by_rank: bool | None = None
        """Whether each rank has an order of its own; None before that is decided."""
        self._draws_by_rank: bool | None = None
        """The same of generators that samplers own."""
        self._rank = 0
        self._drawn_from = own_generators(readers_of(loader))
        self._taken: Taken | None = None
        """Of the newest batch."""
        self._expected: dict[str, int] | None = None
        """Marks of the last batch before a restart; None if they say nothing about this data."""
        self._is_mine = False
        """Whether it was this rank that noted them."""

    @property
    def loader(self) -> Any:
        """Return the loader that is followed."""
        return self._loader

    @property
    def ends_epoch(self) -> bool:
        """Return whether the newest batch was the last one of its epoch, if that is known."""
        return self._num_batches in (self._most, _length(self._loader))

    @property
    def _most(self) -> int | None:
        """Return after how many batches an epoch ends here; None for the loader's own end."""
        if own_loop.present is None or kept_iterator(self._loader) is not None:
            return None
        num_samples = _length(getattr(self._loader, "dataset", None))
        return own_loop.present.ctx.limited_batches(_length(self._loader), num_samples)

    def __len__(self) -> int:
        """Return the batches of an epoch on this rank."""
        return self._most or len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        raise BadTask("es.loader: iterate data.batches(state), which goes on where the state is")

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the newest batch."""
        return {
            "epoch": self.epoch,
            "num_batches": self._num_batches,
            "world_size": self._world_size,
            "length": _length(self._loader),
            "kind": type(self._loader).__qualname__,
            "by_rank": self._by_rank,
            "draws_by_rank": self._draws_by_rank,
            "rank": self._rank,
            "marks": self._taken.marks if self._taken is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after that batch."""
        self.epoch, self._num_batches = state["epoch"], state["num_batches"]
        self._world_size, self._length = state["world_size"], state.get("length")
        self._by_rank, self._draws_by_rank = state["by_rank"], state["draws_by_rank"]
        # Only a loader of the same kind has the same order.
        is_alike = state.get("kind") == type(self._loader).__qualname__
        self._expected = state["marks"] if is_alike else None
        self._rank = state.get("rank", 0)
        self._taken = None

    @property
    def own_draws(self) -> str:
        """Return a digest of the states of the generators that samplers own."""
        return digest_of(own_generators(samplers_of(self._loader), of_samplers=True))

    @property
    def mark(self) -> int:
        """Return a digest of the newest batch; 0 if there is none."""
        return self._taken.whole if self._taken is not None else 0

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
        _require_own_iterator(self._loader)
        if self._drawn_from and bool(getattr(self._loader, "num_workers", 0)):
            logger.warning(
                "the data or the collate function of es.loader draws from a generator of its own "
                "in loader processes, so a restart within an epoch draws other numbers: draw from "
                "torch's generator in es.loader(dataset, …), or set num_workers=0"
            )
        if self._by_rank is None:
            self._by_rank = state.seeds_differ and not divides(self._loader)
        if self._draws_by_rank is None:
            self._draws_by_rank = state.draws_differ
        tell_epoch(self._loader, self.epoch)
        self._require_same_epochs(state)
        self._move_to(state.world_size, state.rank)
        seeded: int | None = None
        while epochs is None or self.epoch < epochs:
            is_empty, most = self._num_batches == 0, self._most
            rest = iter(self._rest_of_epoch(state))
            while True:
                self._draw(state, self._num_batches)
                if (batch := next(rest, _END)) is _END:
                    break
                if steps is not None and state.step_number >= steps:
                    return
                is_empty = False
                state.begin_step()
                self._num_batches += 1
                self._taken = Taken(batch)
                if seeded != state.step_number:
                    # The loader may have drawn; what the step draws depends on its number alone.
                    seeded = state.step_number
                    state.reseed()
                yield batch
                if self._num_batches == most:
                    break
            if is_empty:
                raise BadTask("es.loader: the DataLoader yields no batch")
            if steps is not None and state.step_number >= steps:
                return
            self.epoch, self._num_batches, self._taken = self.epoch + 1, 0, None

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
            self.epoch, self._num_batches, self._expected = self.epoch + 1, 0, None
        self._length = length

    def _move_to(self, world_size: int, rank: int) -> None:
        """Go on at another world size: at the same number of batches of all ranks."""
        if self._world_size != world_size:
            self._expected = None
        self._is_mine, self._rank = self._rank == rank, rank
        if self._world_size not in (0, world_size) and self._num_batches:
            done = self._num_batches * self._world_size
            self._num_batches, repeated = divmod(done, world_size)
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
        expected, self._expected = self._expected, None
        loader, num_done = self._loader, self._num_batches
        if num_done and num_done == self._most:
            return
        if num_done and expected is not None:
            mine = expected if self._is_mine else None
            yield from ReadAgain(
                loader,
                num_done,
                self.epoch,
                lambda: self._order(state),
                mine,
                "es.loader",
                lambda number: self._draw(state, number),
            ).rest(state)
        else:
            self._order(state)
            yield from after_batches(loader, num_done) if num_done else loader

    def _draw(self, state: Followed, number: int) -> None:
        """Seed the generators that the data and the collate function own for a batch of the epoch,
        which this process reads."""
        if self._drawn_from:
            seed_anew(self._drawn_from, key(state.seed, self.epoch, number, state.rank, _OWN))

    def _order(self, state: Followed) -> None:
        """Give the epoch its order."""
        loader = self._loader
        for part in samplers_of(loader):
            if hasattr(part, "initial_seed"):  # of Accelerate's sampler, which adds the epoch
                part.initial_seed = state.seed >> 1
        by_rank, draws_by_rank = (
            1 + state.rank if differ else 0 for differ in (self._by_rank, self._draws_by_rank)
        )
        set_order(loader, state.seed, self.epoch, by_rank, draws_by_rank)


@dataclass(frozen=True)
class ReadAgain:
    """A place within an epoch where a restart goes on. Its last batch is read again, on all ranks
    alike, and compared where it was noted."""

    loader: Any
    num_done: int
    """Batches of the epoch before it; at least one."""
    epoch: int
    order: Callable[[], None]
    """Gives the epoch its order."""
    expected: Mapping[str, int] | None
    """Marks of the last batch; None on a rank that did not note them."""
    who: str
    """Begins an error."""
    draw: Callable[[int], None] = lambda number: None
    """Seeds the generators that data owns for a batch of the epoch."""

    def rest(self, state: Resumed) -> Iterator[Any]:
        """Return the batches from here on.

        Raises DataChanged if the last one before is another one now. What differs between two
        readings is random. A collective: loaders may exchange batches.
        """
        step = state.step_number
        rest, found = self._last(state, step - 1, _LEAD)
        other = differing(self.expected, found) if self.expected is not None else []
        if any(state.gather(bool(other))):
            changed = other
            if kept_iterator(self.loader) is None:
                for lead in _LEADS_AGAIN:
                    drawn = differing(found, self._last(state, -1 - lead, lead)[1])
                    changed = [name for name in changed if name not in drawn]
            if changed:
                raise DataChanged(
                    f"{self.who}: batch {self.num_done} of epoch {self.epoch}, the last one of "
                    f"step {step}, is another one than before: {', '.join(changed[:3])}. Put the "
                    "data back as it was, sort what a directory or a set lists, and let samplers "
                    "and data draw from torch's generator; or start a new run"
                )
            # Loader processes that live on serve one iterator only.
            rest, _ = self._last(state, step - 1, _LEAD)
        state.reseed()  # as before each batch: what the data draws in this process
        self.draw(self.num_done)
        return rest

    def _last(self, state: Resumed, step: int, lead: int) -> tuple[Iterator[Any], dict[str, int]]:
        """Read the last batch again. Return the batches after it, and its marks.

        Args:
            step: seeds what the data draws in this process. A loader may read one batch ahead, so
                the last but one is seeded, too; not the first, with which the order may be drawn.
            lead: batches that are read before it and dropped, if others can be skipped.
        """
        self.order()
        before = self.num_done - 1
        num_read = min(lead, before) if skips(self.loader) else before
        num_skipped = before - num_read
        rest = iter(after_batches(self.loader, num_skipped) if num_skipped else self.loader)
        last = None
        for at in range(num_read + 1):
            if at and at >= num_read - 1:
                state.reseed(step - num_read + at)
            self.draw(num_skipped + at)
            last = next(rest, None)
        return rest, Taken(last).marks


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


def _require_own_iterator(loader: Any) -> None:
    """Raise BadTask for a loader whose one iterator reads ahead, or draws, over the ends of epochs:
    where it is depends on all that was read before."""
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


def _length(loader: Any) -> int | None:
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
    seed_anew(own, key(seed, epoch, _OWN, stream_of_own))


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


def readers_of(loader: Any) -> list[Any]:
    """Return the data sets of a loader, and the object that its collate function is, or is a method
    of."""
    collate = getattr(loader, "collate_fn", None)
    owner = getattr(collate, "__self__", collate)
    data = list(data_sets_in(getattr(loader, "dataset", None), set()))
    return data if isinstance(owner, torch.nn.Module) else [*data, owner]


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
    """Return whether batches can be left out without loading them: those of torch's own class
    follow from the sampler's alone, as do those of torchdata's, and Accelerate knows how."""
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
