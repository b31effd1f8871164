"""Commit the tensors that forward passes change, such as running statistics, once a step and with
the same values at every world size.

Every micro-batch starts from the values at the beginning of the step. For each tensor that forward
passes change, the step commits one of two values:

- ``mean``: the mean of the values after each micro-batch, weighted by its samples. So running
  statistics take one momentum update a step, and ``num_batches_tracked`` counts steps.
- ``first``: the value after the global batch's first micro-batch. It is used where a mean has no
  meaning: for integers and booleans, for buffers in the same module as these (a queue and its
  pointer), and for parameters that are not trained (a teacher's).

A module chooses for all of its tensors by an attribute ``buffers_take = "mean"`` or ``"first"``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

from train_fn.errors import BadTask
from train_fn.step.peers import Peers
from train_fn.step.untrained import (
    Kept,
    Place,
    Watch,
    copy_all,
    is_alike,
    keep,
    present,
    shape_fault,
)

logger = logging.getLogger(__name__)

Rule = Literal["mean", "first"]
_ALIGNMENT = 16
"""Alignment in bytes that suits the elements of every dtype."""


@dataclass
class _Late:
    """Hold a tensor that this rank saw change for the first time. The ranks have not agreed on it
    yet."""

    tensor: torch.Tensor
    before: torch.Tensor | None
    """Its value when the step began; None if no copy was kept."""
    first: torch.Tensor
    """Its value after this rank's first pass."""
    total: torch.Tensor
    """The sum of its values after each pass, weighted by the pass's samples."""


class VolatileBuffers:
    """Track and commit the tensors that forward passes change in one replica.

    A step calls, in order: ``begin``; ``passed`` after each forward pass, and ``rewind`` before
    each but the first; ``start`` before the last backward pass and ``wait`` after it; ``agree`` if
    the totals say that some rank saw a tensor change for the first time; ``adopt``. A step that
    fails calls ``put_back``.

    Args:
        places: of all tensors that the optimizer does not change.
        moving: numbers of places that are known to change, the same on every rank.
        ignored: numbers of places whose tensor depends on the batch alone (such as a mask of its
            length). They are left alone.
        carry: is called with the places that change.
        runs_again: whether backward passes run forward passes again, which changes buffers a second
            time.
    """

    def __init__(
        self,
        places: list[Place],
        moving: Iterable[int],
        ignored: Iterable[int],
        peers: Peers,
        carry: Callable[[list[Place]], None],
        *,
        runs_again: bool = False,
    ) -> None:
        self._places, self._peers, self._ignored, self._carry = places, peers, set(ignored), carry
        self._may_be_plain = peers.alone and not runs_again
        self._late: dict[int, _Late] = {}
        self._unfit: dict[int, Kept] = {}
        """Tensors that took another shape since the watch began."""
        self._agreed: dict[int, torch.Tensor] = {}
        self._is_kept = self._is_plain = False
        self._num_samples = self._own_samples = self._num_passes = 0
        self._works: list[dist.Work] = []
        self._follow(moving)

    def _follow(self, moving: Iterable[int]) -> None:
        """Follow these places as the moving ones, starting from their current values."""
        self._moving = sorted(set(moving) - self._ignored)
        left = set(range(len(self._places))) - self._ignored - set(self._moving) - set(self._late)
        self._watch = Watch(
            {number: self._places[number] for number in sorted(left - set(self._unfit))}
        )
        self._carry(self.moving)
        self._slots = [(place.holder, place.key) for place in self.moving]
        self._tensors = [present(place) for place in self.moving]
        self._before = [tensor.detach().clone() for tensor in self._tensors]
        rules = rules_of(self.moving)
        self._means = [at for at, rule in enumerate(rules) if rule == "mean"]
        self._firsts = [at for at, rule in enumerate(rules) if rule == "first"]
        means, firsts = (
            [self._tensors[at] for at in group] for group in (self._means, self._firsts)
        )
        sizes = [tensor.numel() for tensor in means]
        self._sums = torch.zeros(sum(sizes), dtype=torch.float64, device=self._peers.device)
        self._values = torch.zeros_like(self._sums)
        self._sum_of, self._value_of = (
            [
                part.view(tensor.shape)
                for part, tensor in zip(torch.split(flat, sizes), means, strict=True)
            ]
            if means
            else []
            for flat in (self._sums, self._values)
        )
        self._bytes, self._first_of = _flat_like(firsts, self._peers.device)

    @property
    def moving(self) -> list[Place]:
        """Return the places of the tensors that forward passes change."""
        return [self._places[number] for number in self._moving]

    @property
    def has_news(self) -> bool:
        """Return whether this rank saw a tensor change that the ranks have not agreed on."""
        return bool(self._late)

    def renew(self) -> None:
        """Make all current values the new baseline. Call this after the state was restored, or
        after code of the task ran between two steps."""
        self._follow(self._moving)

    # -- a step

    def begin(self, num_samples: int, num_passes: int) -> None:
        """Save the values at the beginning of a step.

        Args:
            num_samples: samples in the global batch.
            num_passes: forward passes of this rank.
        """
        self._is_plain = self._may_be_plain and num_passes == 1
        self._num_samples, self._own_samples, self._num_passes = num_samples, 0, 0
        if moved := self._watch.moved():  # for example by an optimizer hook
            self._watch.refresh(moved)
        for late in self._late.values():
            late.before, late.total = late.tensor.detach().clone(), torch.zeros_like(late.total)
        self._keep()

    def _keep(self) -> None:
        self._is_kept = True
        copy_all(self._before, self._tensors)

    def rewind(self) -> None:
        """Reset the tensors to their values at the beginning of the step, for the next forward
        pass."""
        self._put_own_in_place()
        copy_all(self._tensors, self._before)
        for number, late in self._late.items():
            self._places[number].holder[self._places[number].key] = late.tensor
            if late.before is not None:
                copy_all([late.tensor], [late.before])

    def passed(self, num_samples: int) -> None:
        """Add the values after a forward pass on ``num_samples`` samples. The number is 0 if this
        rank ran the pass only because its peers did."""
        fault = self._note_late(num_samples)
        if fault is not None:
            raise fault
        is_first, self._num_passes = self._num_passes == 0, self._num_passes + 1
        self._own_samples += num_samples
        if not self._tensors:
            return
        now = self._now()
        if self._is_plain:
            return
        if is_first and self._means:
            copy_all(self._sum_of, [now[at] for at in self._means])
            # Infinity times 0 is NaN, not 0.
            self._sums.mul_(num_samples) if num_samples else self._sums.zero_()
        elif num_samples and self._means:
            copy_all(self._value_of, [now[at] for at in self._means])
            self._sums.add_(self._values, alpha=num_samples)
        if is_first and self._firsts and self._peers.rank == 0:
            copy_all(self._first_of, [now[at] for at in self._firsts])

    def start(self) -> None:
        """Start the collectives over ranks. Call this after the step's last forward pass, so that
        they overlap with its backward pass."""
        sums = self._peers.start_sum(self._sums) if self._means else None
        firsts = self._peers.start_broadcast(self._bytes, 0) if self._firsts else None
        self._works = [work for work in (sums, firsts) if work is not None]

    def wait(self) -> None:
        """Wait for the values of all ranks. Raise the collective's error if a peer is gone."""
        for work in self._works:
            work.wait()
        self._works = []

    def adopt(self) -> None:
        """Write the step's committed values into the model."""
        now = self._now() if self._is_plain else []
        self._put_own_in_place()
        if self._is_plain:
            replaced = [
                (own, there)
                for own, there in zip(self._tensors, now, strict=True)
                if own is not there
            ]
            copy_all([own for own, _ in replaced], [there for _, there in replaced])
        elif self._tensors:
            self._sums.div_(self._num_samples)
            copy_all([self._tensors[at] for at in self._means], self._sum_of)
            copy_all([self._tensors[at] for at in self._firsts], self._first_of)
        self._is_kept = False
        if self._agreed:
            self._adopt_agreed()

    def before_step(self) -> list[tuple[Place, torch.Tensor]] | None:
        """Return the places that forward passes change, each with its value from the beginning of
        the step. Return None if a tensor changed whose earlier value is not known.

        This changes nothing. Another thread calls it while the training thread is blocked.
        """
        if not self._is_kept:
            return []
        if self._late or self._unfit or self._watch.moved() or self._watch.differing():
            return None
        return list(zip(self.moving, self._before, strict=True))

    def put_back(self) -> list[str]:
        """Undo the changes that forward passes made in a step that was not committed.

        Return the names of the tensors that cannot be restored, or may not have been. A state with
        these tensors belongs to no step.
        """
        torn: list[int] = []
        if self._is_kept:
            self._note_late(0)
            for number, kept in self._unfit.items():
                self._places[number].holder[self._places[number].key] = kept.tensor
            torn = [number for number, late in self._late.items() if late.before is None]
            torn += [number for number, kept in self._unfit.items() if self._is_torn(number, kept)]
            try:
                self.rewind()
            except RuntimeError:  # a tensor took another shape through its .data
                torn += self._moving
        self._is_kept = False
        return [self._places[number].name for number in torn + self._watch.differing()]

    def _is_torn(self, number: int, kept: Kept) -> bool:
        return self._places[number].is_saved and kept.differs(kept.tensor)

    def _now(self) -> list[torch.Tensor]:
        """Return the tensors that are in place now. Where the shape has changed, return the one
        from the beginning of the step instead.

        Raise BadTask if the ``state_dict`` contains a tensor with a changed shape.
        """
        now = [holder[key] for holder, key in self._slots]
        for at, (tensor, own) in enumerate(zip(now, self._tensors, strict=True)):
            if tensor is not own and (tensor is None or not is_alike(tensor, own)):
                fault = shape_fault(self.moving[at], tensor, own)
                if fault is not None:
                    raise fault
                now[at] = own
        return now  # type: ignore[return-value]

    def _put_own_in_place(self) -> None:
        for (holder, key), tensor in zip(self._slots, self._tensors, strict=True):
            holder[key] = tensor

    # -- an evaluation

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Undo the changes of an evaluation's forward passes inside the block. Call ``rewind``
        before each, so that all start from the same values."""
        self._keep()
        try:
            yield
        finally:
            self.rewind()
            self._is_kept = False

    def find_unnoticed(self) -> None:
        """Find tensors that were written through ``.data`` or changed by an evaluation, and follow
        them from now on. Call this between two steps."""
        moved = set(self._watch.moved())
        for number, kept in self._watch.drop(moved | set(self._watch.differing())).items():
            place = self._places[number]
            logger.warning(
                "%s was changed through its .data, or by an evaluation; its changes are followed "
                "from now on",
                place.name,
            )
            if number in moved:
                place.holder[place.key] = kept.tensor
                copy_all([kept.tensor], [kept.copy if kept.copy is not None else kept.tensor])
            self._late[number] = _late_of(kept, kept.tensor, 0, 0, is_first=True)

    # -- what moves for the first time

    def _note_late(self, num_samples: int) -> BadTask | None:
        """Find tensors that changed for the first time in a forward pass, and add the values of
        those found earlier.

        Return the error if a tensor took a shape that is not allowed, else None.
        """
        is_first, fault = self._num_passes == 0, None
        for number, late in self._late.items():
            now = self._places[number].tensor
            if now is None or not is_alike(now, late.tensor):
                fault = fault or shape_fault(self._places[number], now, late.tensor)
                continue
            late.total += now.detach().double() * num_samples
            late.first = now.detach().clone() if is_first else late.first
        moved = self._watch.moved()
        for number, kept in self._watch.drop(moved).items() if moved else ():
            place, now = self._places[number], self._places[number].tensor
            if now is None or not is_alike(now, kept.form):
                fault = fault or shape_fault(place, now, kept.form)
                self._unfit[number] = kept  # without a fault, it depends on the batch
                continue
            logger.info("%s moved in a forward pass for the first time", place.name)
            self._late[number] = _late_of(
                kept, now, self._own_samples, num_samples, is_first=is_first
            )
        return fault

    def agree(self) -> None:
        """Agree over ranks on which tensors changed for the first time in this step, and on their
        values. All ranks call this at the same step."""
        peers = self._peers
        numbers = sorted({number for each in peers.gather(list(self._late)) for number in each})
        for number in numbers:
            if number not in self._late:
                self._late[number] = self._unmoved(number)
        rules = dict(
            zip(
                numbers,
                rules_of([self._places[number] for number in numbers], self.moving),
                strict=True,
            )
        )
        firsts = peers.share(
            {
                number: self._late[number].first.cpu()
                for number in numbers
                if rules[number] == "first"
            },
            0,
        )
        totals = peers.gather(
            {
                number: self._late[number].total.cpu()
                for number in numbers
                if rules[number] == "mean"
            }
        )
        means = {
            number: sum(each[number] for each in totals) / self._num_samples for number in totals[0]
        }
        self._agreed = firsts | means

    def _unmoved(self, number: int) -> _Late:
        """Return the entry for a tensor that changed only on other ranks."""
        [kept] = (self._watch.drop([number]) or {number: self._unfit.pop(number)}).values()
        return _late_of(
            keep([kept.tensor], kept.tensor.nbytes)[0],
            kept.tensor,
            self._own_samples,
            0,
            is_first=True,
        )

    def _adopt_agreed(self) -> None:
        for number, value in self._agreed.items():
            place, tensor = self._places[number], self._late[number].tensor
            place.holder[place.key] = tensor
            copy_all([tensor], [value.to(tensor.device)])
        moving = [*self._moving, *self._agreed]
        self._late, self._agreed = {}, {}
        self._follow(moving)


def _late_of(
    kept: Kept, now: torch.Tensor, own_samples: int, num_samples: int, *, is_first: bool
) -> _Late:
    before = now.detach() if kept.copy is None else kept.copy
    total = before.double() * own_samples + now.detach().double() * num_samples
    return _Late(kept.tensor, kept.copy, (now.detach() if is_first else before).clone(), total)


def rules_of(places: Sequence[Place], others: Sequence[Place] = ()) -> list[Rule]:
    """Return which value the step commits for each of ``places``.

    This depends on what else changes in a tensor's module, among ``places`` and ``others``. Raise
    BadTask for a module whose ``buffers_take`` is neither 'mean' nor 'first'.
    """
    counting = {place.module for place in (*places, *others) if not _is_number(place)}
    rules: list[Rule] = []
    for place in places:
        asked = getattr(place.module, "buffers_take", None)
        if asked not in (None, "mean", "first"):
            raise BadTask(
                f"buffers_take of {type(place.module).__name__} is {asked!r}; it is 'mean' or "
                "'first'"
            )
        if asked == "mean" and not present(place).is_complex() and _is_number(place):
            rules.append("mean")
        else:
            meant = (
                asked is None
                and place.is_buffer
                and _is_number(place)
                and place.module not in counting
            )
            rules.append("mean" if meant else "first")
    return rules


def _is_number(place: Place) -> bool:
    """Return whether a mean of the tensor's values has a meaning by itself. It has for real
    numbers, and for BatchNorm's count, which every pass increases by one."""
    is_count = place.key == "num_batches_tracked" and isinstance(place.module, _NormBase)
    return present(place).is_floating_point() or is_count


def _flat_like(
    tensors: list[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return one flat uint8 tensor with room for all ``tensors``, and views into it with the dtype
    and shape of each."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + math.ceil(size / _ALIGNMENT) * _ALIGNMENT)
    flat = torch.zeros(begins[-1], dtype=torch.uint8, device=device)
    shares = [
        flat[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        for tensor, begin, size in zip(tensors, begins, sizes, strict=False)
    ]
    return flat, shares
