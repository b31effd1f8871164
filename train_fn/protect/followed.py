"""``es.loader`` of a DataLoader: it goes on at the very batch, by its place in the epoch.

A loader is replayed by its own iterator; torch's own class skips without loading. The last batch is
read again and compared. A state that a loader has of its own is not used: it is that of one rank,
which others may not share.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, Protocol

from train_fn import own_loop
from train_fn.errors import BadTask, DataChanged
from train_fn.protect.batches import Taken, differing
from train_fn.protect.data_order import (
    OWN,
    after_batches,
    divides,
    kept_iterator,
    num_in,
    require_own_iterator,
    samplers_of,
    set_order,
    skips,
    tell_epoch,
)
from train_fn.samples.sampler import digest_of, key, own_generators, seed_anew

_END = object()
_LEAD = 2
"""Batches that are read before the last one when it is compared: as many as have their seeds."""
_MOST_PLACES, _MOST_READ = 16, 2
"""Batches of which the places, or the contents, are compared before a loop begins."""
_MOST_WALKED = 100_000
"""Batches of the first epoch that a copy of a sampler makes before the second is compared."""
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
    must_be_alike: bool
    """Whether only the loop that began the run may go on."""

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

    def waited(self, seconds: float) -> None:
        """Note how long the loop waited for a batch."""

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
        self._length = num_in(loader)
        """Batches of an epoch that the state was trained on; None if that is not known."""
        self._by_rank: bool | None = None
        """Whether each rank has an order of its own; None before that is decided."""
        self._draws_by_rank: bool | None = None
        """The same of generators that samplers own."""
        self._rank = 0
        collate = getattr(loader, "collate_fn", None)
        readers = (getattr(loader, "dataset", None), getattr(collate, "__self__", collate))
        self._drawn_from = own_generators(readers)
        self._taken: Taken | None = None
        """Of the newest batch."""
        self._expected: dict[str, int] | None = None
        """Marks of the last batch before a restart; None if they say nothing about this data."""
        self._ended: dict[str, Any] | None = None
        """The last batch of the epoch before: how many there were, and its marks."""
        self._unread: dict[str, Any] | None = None
        """The same before a restart, until it is read again."""
        self._noted_by = -1
        """The rank that noted them."""

    @property
    def loader(self) -> Any:
        """Return the loader that is followed."""
        return self._loader

    def ends_epoch_in(self, batches: int) -> bool:
        """Return whether an epoch ends so many batches after the newest one, if that is known."""
        return self._num_batches + batches in (self._most, num_in(self._loader))

    @property
    def _most(self) -> int | None:
        """Return after how many batches an epoch ends here; None for the loader's own end."""
        if own_loop.present is None or kept_iterator(self._loader) is not None:
            return None
        num_samples = num_in(getattr(self._loader, "dataset", None))
        return own_loop.present.ctx.limited_batches(num_in(self._loader), num_samples)

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
            "length": num_in(self._loader),
            "kind": type(self._loader).__qualname__,
            "by_rank": self._by_rank,
            "draws_by_rank": self._draws_by_rank,
            "rank": self._rank,
            "marks": self._taken.marks if self._taken is not None else None,
            "ended": self._ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after that batch."""
        self.epoch, self._num_batches = state["epoch"], state["num_batches"]
        self._world_size, self._length = state["world_size"], state.get("length")
        self._by_rank, self._draws_by_rank = state["by_rank"], state["draws_by_rank"]
        # Only a loader of the same kind has the same order.
        is_alike = state.get("kind") == type(self._loader).__qualname__
        self._expected = state["marks"] if is_alike else None
        self._ended = self._unread = state.get("ended") if is_alike else None
        self._noted_by = self._rank = state.get("rank", 0)
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
        require_own_iterator(self._loader)
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
        if not state.step_number and not self.epoch and not self._num_batches:
            self._require_place(state)
        tell_epoch(self._loader, self.epoch)
        self._require_same_epochs(state)
        self._move_to(state.world_size, state.rank)
        self._require_same_end(state)
        seeded: int | None = None
        while epochs is None or self.epoch < epochs:
            is_empty, most = self._num_batches == 0, self._most
            rest = iter(self._rest_of_epoch(state))
            while True:
                self._draw(state, self._num_batches)
                began = time.perf_counter()
                if (batch := next(rest, _END)) is _END:
                    break
                state.waited(time.perf_counter() - began)
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
            marks = self._taken.marks if self._taken is not None else None
            self._ended = {"num_batches": self._num_batches, "marks": marks} if marks else None
            self.epoch, self._num_batches, self._taken = self.epoch + 1, 0, None

    def _require_place(self, state: Followed) -> None:
        """Raise BadTask for a loader whose place does not follow from epoch and batch. It gives
        other batches if the same epoch is begun again, or if this process has not made the epochs
        before."""
        if kept_iterator(self._loader) is not None:
            return
        if self._counts_epochs(state) or self._begun(state) != self._begun(state):
            raise not_followed(self._loader, "es.loader")

    def _counts_epochs(self, state: Followed) -> bool:
        """Return whether the second epoch depends on whether this process has made the first: a
        user's sampler may count epochs, or keep something from the first."""
        parts = [each for each in samplers_of(self._loader) if each is not self._loader]
        if not skips(self._loader) or all(type(e).__module__.startswith("torch.") for e in parts):
            return False
        sampler, data = self._loader.batch_sampler, self._loader.dataset
        try:
            fresh, used = (copy.deepcopy(sampler, {id(data): data}) for _ in range(2))
        except Exception:  # it holds what cannot be copied
            return False
        self._places(used, state, 0, _MOST_WALKED)
        return self._places(used, state, 1) != self._places(fresh, state, 1)

    def _places(
        self, sampler: Any, state: Followed, epoch: int, most: int = _MOST_PLACES
    ) -> list[Any]:
        """Return the first batches of an epoch, as a sampler alone says them."""
        set_order(SimpleNamespace(batch_sampler=sampler), state.seed, epoch, *self._streams(state))
        return [list(each) for each in islice(sampler, most)]

    def _begun(self, state: Followed) -> list[Any]:
        """Begin the epoch. Return the places of its first batches, as far as a sampler says them;
        else their marks."""
        self._order(state)
        if skips(self._loader):
            return [list(each) for each in islice(self._loader.batch_sampler, _MOST_PLACES)]
        found, data = list[Any](), getattr(self._loader, "dataset", None)
        place = _place_of(data)
        for at, batch in enumerate(islice(self._loader, _MOST_READ)):
            found.append(Taken(batch).marks)
            self._draw(state, at + 1)
        if data is not None and place is not None:
            data.load_state_dict(place)
        return found

    def _require_same_end(self, state: Followed) -> None:
        """Raise DataChanged if only the loop that began the run may go on, and the last batch of
        the epoch before is another one now."""
        ended, self._unread = self._unread, None
        is_kept = kept_iterator(self._loader) is not None
        if not state.must_be_alike or self._num_batches or ended is None or is_kept:
            return
        self.epoch -= 1
        self._read_again(state, ended["num_batches"], ended["marks"])
        self.epoch += 1

    def _require_same_epochs(self, state: Followed) -> None:
        """Raise DataChanged if this rank's place is one in other data: of a run that was forked, or
        whose data set was changed. Its end of an epoch is one of any data."""
        length, known = num_in(self._loader), self._length
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
            self._expected = self._unread = None
        self._rank = rank
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
            yield from self._read_again(state, num_done, expected)
        else:
            self._order(state)
            yield from after_batches(loader, num_done) if num_done else loader

    def _read_again(
        self, state: Followed, num_done: int, expected: dict[str, int]
    ) -> Iterator[Any]:
        """Return the batches of this epoch after so many, once the last of these was compared."""
        mine = expected if self._noted_by == self._rank else None
        order, draw = partial(self._order, state), partial(self._draw, state)
        who = "es.loader"
        return ReadAgain(self._loader, num_done, self.epoch, order, mine, who, draw).rest(state)

    def _draw(self, state: Followed, number: int) -> None:
        """Seed the generators that the data and the collate function own for a batch of the epoch,
        which this process reads."""
        if self._drawn_from:
            seed_anew(self._drawn_from, key(state.seed, self.epoch, number, state.rank, OWN))

    def _order(self, state: Followed) -> None:
        """Give the epoch its order."""
        loader = self._loader
        for part in samplers_of(loader):
            if hasattr(part, "initial_seed"):  # of Accelerate's sampler, which adds the epoch
                part.initial_seed = state.seed >> 1
        set_order(loader, state.seed, self.epoch, *self._streams(state))

    def _streams(self, state: Followed) -> Iterator[int]:
        """Yield the streams of the order's draws, and of those of generators that samplers own."""
        for differ in (self._by_rank, self._draws_by_rank):
            yield 1 + state.rank if differ else 0


def _place_of(data: Any) -> Any:
    """Return the state of data that keep their place from one iteration to the next. Return None
    for others, also for those whose state depends on what a loader says."""
    if not hasattr(data, "state_dict") or not hasattr(data, "load_state_dict"):
        return None
    try:
        return copy.deepcopy(data.state_dict())
    except TypeError:
        return None


def not_followed(loader: Any, who: str) -> BadTask:
    """Return the error for a loader that is another one whenever an epoch is begun."""
    return BadTask(
        f"{who}: {type(loader).__name__} gives other batches when an epoch is begun again: it "
        "counts how often it was iterated, uses up its data, or draws from what nothing seeds, so "
        "no restart could find its place. Let set_epoch(epoch) say which epoch it is, draw from "
        "torch's generator, read its data set by a plain DataLoader, or use es.loader(dataset, "
        "global_batch_size=…)"
    )


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
            rest, again = self._last(state, step - 1, _LEAD)
            if other and not skips(self.loader) and differing(found, again):
                raise not_followed(self.loader, self.who)
            if other:
                logger.warning(
                    "%s: what the data draw for a sample by themselves, as random crops in loader "
                    "processes, is not restored: batches of epoch %d are others than in an "
                    "undisturbed run. Draw from torch's generator with num_workers=0, or use "
                    "es.loader(dataset, …), which seeds every sample",
                    self.who,
                    self.epoch,
                )
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
