"""Commit the tensors that forward passes change, such as running statistics, once a step and with
the same values at every world size.

Every micro-batch starts from the values at the beginning of the step. For each tensor that forward
passes change, the step commits one value, chosen by ``buffer_rules``: the mean of the values after
each micro-batch, or the value after the first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from train_fn.step.late_changes import LateChanges
from train_fn.step.peers import Peers
from train_fn.step.untrained import (
    Rule,
    TensorPlace,
    copy_all,
    is_alike,
    present,
    rules_of,
    shape_fault,
)


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
        make_values: makes the sums of tensors that are known to change; those here add up rank by
            rank, in the order of ranks.
        make_late: makes the watch over the others.
    """

    def __init__(
        self,
        places: list[TensorPlace],
        moving: Iterable[int],
        ignored: Iterable[int],
        peers: Peers,
        carry: Callable[[list[TensorPlace]], None],
        *,
        runs_again: bool = False,
        make_values: Callable[..., StepValues] | None = None,
        make_late: Callable[..., LateChanges] = LateChanges,
    ) -> None:
        self._places, self._peers, self._ignored, self._carry = places, peers, set(ignored), carry
        self._make_values = make_values or StepValues
        self._may_be_plain = peers.alone and not runs_again and make_values is None
        self._late = make_late(places, self._ignored, peers)
        self._is_kept = self._is_plain = False
        self._num_samples = self._own_samples = self._num_passes = 0
        self._follow(moving)

    def _follow(self, moving: Iterable[int]) -> None:
        """Follow these places as the moving ones, starting from their current values."""
        self._moving = sorted(set(moving) - self._ignored)
        self._late.watch_others(self._moving)
        self._carry(self.moving)
        self._slots = [(place.holder, place.key) for place in self.moving]
        self._tensors = [present(place) for place in self.moving]
        self._before = [tensor.detach().clone() for tensor in self._tensors]
        self._values = self._make_values(self._tensors, rules_of(self.moving), self._peers)

    @property
    def moving(self) -> list[TensorPlace]:
        """Return the places of the tensors that forward passes change."""
        return [self._places[number] for number in self._moving]

    @property
    def ignored(self) -> list[TensorPlace]:
        """Return the places of the tensors that depend on the batch alone."""
        return [self._places[number] for number in sorted(self._ignored)]

    @property
    def has_news(self) -> bool:
        """Return whether this rank saw a tensor change that the ranks have not agreed on."""
        return bool(self._late.found)

    def renew(self) -> None:
        """Make all current values the new baseline. Call this after the state was restored, or
        after code of the task ran between two steps."""
        self._follow(self._moving)

    def rebase(self) -> None:
        """Take the present values for those between two steps, after code of the task has changed
        some within the commit. Also save what it changed that the ``state_dict`` leaves out."""
        self._carry(self._late.unsaved_changes())
        if any(
            holder[key] is not tensor
            for (holder, key), tensor in zip(self._slots, self._tensors, strict=True)
        ):
            self._follow(self._moving)
        else:
            self._late.watch_others(self._moving)

    # -- a step

    def begin(self, num_samples: int, num_passes: int) -> None:
        """Save the values at the beginning of a step.

        Args:
            num_samples: samples in the global batch.
            num_passes: forward passes of this rank.
        """
        self._is_plain = self._may_be_plain and num_passes == 1
        self._num_samples, self._own_samples, self._num_passes = num_samples, 0, 0
        self._late.begin()
        self._is_kept = True
        copy_all(self._before, self._tensors)

    def rewind(self) -> None:
        """Reset the tensors to their values at the beginning of the step, for the next forward
        pass."""
        self._put_own_in_place()
        copy_all(self._tensors, self._before)
        if self._late.found:
            self._late.rewind()

    def passed(self, num_samples: int, number: int = 0) -> None:
        """Add the values after a forward pass on ``num_samples`` samples. That is 0 if this rank
        ran the pass only because its peers did. ``number`` is that of its micro-batch."""
        is_first = self._num_passes == 0
        self._late.passes(num_samples, number)
        fault = self._late.note(num_samples, self._own_samples, is_first=is_first)
        if fault is not None:
            raise fault
        self._num_passes += 1
        self._own_samples += num_samples
        if not self._tensors:
            return
        now = self.now()
        if not self._is_plain:
            self._values.add(now, num_samples, is_first=is_first, number=number)

    def start(self) -> None:
        """Start the collectives over ranks. Call this after the step's last forward pass, so that
        they overlap with its backward pass."""
        if self._tensors and not self._peers.alone:
            self._values.start()

    def wait(self) -> None:
        """Wait for the values of all ranks. Raise the collective's error if a peer is gone."""
        if self._tensors and not self._peers.alone:
            self._values.wait()

    def adopt(self) -> None:
        """Write the step's committed values into the model."""
        now = self.now() if self._is_plain else []
        self._put_own_in_place()
        if self._is_plain:
            replaced = [
                (own, there)
                for own, there in zip(self._tensors, now, strict=True)
                if own is not there
            ]
            copy_all([own for own, _ in replaced], [there for _, there in replaced])
        elif self._tensors:
            self._values.write_to(self._tensors, self._num_samples)
        self._is_kept = False
        if self._late.found and (agreed := self._late.adopt()):
            self._follow([*self._moving, *agreed])

    def agree(self) -> None:
        """Agree over ranks on which tensors changed for the first time in this step, and on their
        values. All ranks call this at the same step."""
        self._late.agree(self.moving, self._num_samples, self._own_samples)

    def before_step(self) -> list[tuple[TensorPlace, torch.Tensor]] | None:
        """Return the places that forward passes change, each with its value from the beginning of
        the step. Return None if a tensor changed whose earlier value is not known.

        This changes nothing. Another thread calls it while the training thread is blocked.
        """
        if not self._is_kept:
            return []
        if self._late.has_any():
            return None
        return list(zip(self.moving, self._before, strict=True))

    def rehearse(self) -> None:
        """Compare contents once, as ``before_step`` may have to where no kernel can be loaded."""
        self._late.unnoticed()

    def put_back(self) -> list[str]:
        """Undo the changes that forward passes made in a step that was not committed.

        Return the names of the tensors that cannot be restored, or may not have been. A state with
        these tensors belongs to no step.
        """
        torn: list[int] = []
        if self._is_kept:
            torn = self._late.put_back(self._own_samples, is_first=self._num_passes == 0)
            try:
                self.rewind()
            except RuntimeError:  # a tensor took another shape through its .data
                torn += self._moving
        self._is_kept = False
        return [self._places[number].name for number in torn + self._late.unnoticed()]

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Repeat a forward pass of the present step inside the block, from the values at its
        beginning. Afterwards everything is as it was before the block."""
        slots = [(holder, key, holder[key]) for holder, key in self._slots]
        now = [tensor.detach().clone() for tensor in self.now()]
        self._put_own_in_place()
        copy_all(self._tensors, self._before)
        try:
            yield
        finally:
            for holder, key, tensor in slots:
                holder[key] = tensor
            copy_all(self.now(), now)
            self._late.put_back_new()

    def now(self) -> list[torch.Tensor]:
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

    # -- between two steps

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Undo the changes of an evaluation's forward passes inside the block. Call ``rewind``
        before each, so that all start from the same values."""
        self._is_kept = True
        copy_all(self._before, self._tensors)
        try:
            yield
        finally:
            self.rewind()
            self._is_kept = False

    def find_unnoticed(self) -> None:
        """Find tensors that were written through ``.data`` or changed by an evaluation, and follow
        them from now on. Call this between two steps."""
        self._late.find_unnoticed()


# ---------------------------------------------------------------- step values

# A step's value of each tensor that forward passes change: over the passes of this rank, then over
# all ranks.

_ALIGNMENT = 16
"""Alignment in bytes that suits the elements of every dtype."""


class StepValues:
    """Accumulate the values of ``tensors`` by their rules, and exchange them between ranks.

    Tensors of rule ``mean`` share one float64 vector of weighted sums, which the ranks add up.
    Those of rule ``first`` share one vector of bytes, which rank 0 broadcasts.
    """

    def __init__(self, tensors: list[torch.Tensor], rules: Sequence[Rule], peers: Peers) -> None:
        self._peers = peers
        self._means = [at for at, rule in enumerate(rules) if rule == "mean"]
        self._firsts = [at for at, rule in enumerate(rules) if rule == "first"]
        means = [tensors[at] for at in self._means]
        size = sum(tensor.numel() for tensor in means)
        self._sums = torch.zeros(size, dtype=torch.float64, device=peers.device)
        self._values = torch.zeros_like(self._sums)
        self._sum_of = _views_like(means, self._sums)
        self._value_of = _views_like(means, self._values)
        self._bytes, self._first_of = _flat_like([tensors[at] for at in self._firsts], peers.device)
        self._works: list[dist.Work] = []

    def add(
        self, now: list[torch.Tensor], num_samples: int, *, is_first: bool, number: int = 0
    ) -> None:
        """Add the tensors as they are after a forward pass on ``num_samples`` samples.

        Args:
            is_first: whether it is this rank's first pass of the step.
            number: of its micro-batch.
        """
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
        """Start the collectives over ranks."""
        sums = self._peers.start_sum(self._sums) if self._means else None
        firsts = self._peers.start_broadcast(self._bytes, 0) if self._firsts else None
        self._works = [work for work in (sums, firsts) if work is not None]

    def wait(self) -> None:
        """Wait for the collectives. Raise their error if a peer is gone."""
        for work in self._works:
            work.wait()
        self._works = []

    def write_to(self, tensors: list[torch.Tensor], num_samples: int) -> None:
        """Write the step's values into ``tensors``. ``num_samples`` counts the global batch."""
        if self._means:
            self._sums.div_(num_samples)
            copy_all([tensors[at] for at in self._means], self._sum_of)
        if self._firsts:
            copy_all([tensors[at] for at in self._firsts], self._first_of)


def _views_like(tensors: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Return consecutive parts of ``flat``, with the shape of each of ``tensors``."""
    if not tensors:
        return []
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


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
    views = [
        flat[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        for tensor, begin, size in zip(tensors, begins, sizes, strict=False)
    ]
    return flat, views
