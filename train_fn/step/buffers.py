"""Commit the tensors that forward passes change, such as running statistics, once a step and with
the same values at every world size.

Every micro-batch starts from the values at the beginning of the step. For each tensor that forward
passes change, the step commits one value, chosen by ``buffer_rules``: the mean of the values after
each micro-batch, or the value after the first one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from train_fn.errors import BadTask
from train_fn.step.peers import Peers
from train_fn.step.untrained import (
    Rule,
    TensorPlace,
    TensorWatch,
    copy_all,
    is_alike,
    present,
    rules_of,
    shape_fault,
)

logger = logging.getLogger(__name__)


class MovingBuffers:
    """Track and commit the tensors that forward passes change in one replica.

    A step calls, in order: ``begin``; ``passed`` after each forward pass, and ``rewind`` before
    each but the first; ``start`` before the last backward pass and ``wait`` after it; ``adopt``. A
    step that fails calls ``put_back``.

    Forward passes may change what ``moving`` names, from the first step on, and nothing else: what
    changes later was copied by no rank, and others may not have changed it.

    Args:
        places: of all tensors that the optimizer does not change.
        moving: numbers of places that may change, the same on every rank.
        ignored: numbers of places whose tensor depends on the batch alone (such as a mask of its
            length). They are left alone.
        carry: is called with the places that change.
        runs_again: whether backward passes run forward passes again, which changes buffers a second
            time.
        make_values: makes the sums of tensors that may change; those here add up rank by rank, in
            the order of ranks.
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
    ) -> None:
        self._places, self._peers, self._ignored, self._carry = places, peers, set(ignored), carry
        self._make_values = make_values or StepValues
        self._may_be_plain = peers.alone and not runs_again and make_values is None
        self._is_kept = self._is_plain = False
        self._num_samples = self._num_passes = 0
        self._follow(moving)

    def _follow(self, moving: Iterable[int]) -> None:
        """Follow these places as the moving ones, starting from their current values."""
        self._moving = sorted(set(moving) - self._ignored)
        self._watch_others()
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

    def _watch_others(self) -> None:
        """Watch what no forward pass may change, from the present values."""
        skipped = self._ignored.union(self._moving)
        self._others = TensorWatch(
            {number: place for number, place in enumerate(self._places) if number not in skipped}
        )

    def renew(self) -> None:
        """Make all current values the new baseline. Call this after the state was restored, or
        after code of the task ran between two steps."""
        self._follow(self._moving)

    def rebase(self) -> None:
        """Take the present values for those between two steps, after code of the task has changed
        some within the commit. Also save what it changed that the ``state_dict`` leaves out."""
        self._carry([self._places[number] for number in self._others.unsaved_changes()])
        if any(
            holder[key] is not tensor
            for (holder, key), tensor in zip(self._slots, self._tensors, strict=True)
        ):
            self._follow(self._moving)
        else:
            self._watch_others()

    # -- a step

    def begin(self, num_samples: int, num_passes: int) -> None:
        """Save the values at the beginning of a step.

        Args:
            num_samples: samples in the global batch.
            num_passes: forward passes of this rank.
        """
        self._is_plain = self._may_be_plain and num_passes == 1
        self._num_samples, self._num_passes = num_samples, 0
        if moved := self._others.moved():  # for example by an optimizer hook
            self._others.refresh(moved)
        self._is_kept = True
        copy_all(self._before, self._tensors)

    def rewind(self) -> None:
        """Reset the tensors to their values at the beginning of the step, for the next forward
        pass."""
        self._put_own_in_place()
        copy_all(self._tensors, self._before)

    def passed(self, num_samples: int, number: int = 0) -> None:
        """Add the values after a forward pass on ``num_samples`` samples. That is 0 if this rank
        ran the pass only because its peers did. ``number`` is that of its micro-batch."""
        is_first = self._num_passes == 0
        self._require_others_unchanged()
        self._num_passes += 1
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

    def _require_others_unchanged(self) -> None:
        """Raise BadTask if a forward pass changed a tensor that no pass may change."""
        moved = self._others.moved()
        for number in moved:
            place, kept = self._places[number], self._others.kept(number)
            now = place.tensor
            if now is None or not is_alike(now, kept.form):
                if fault := shape_fault(place, now, kept.form):
                    raise fault
                self._ignored.add(number)  # it depends on the batch, as a cache of its length does
                self._others.drop([number])
            elif kept.copy is None or kept.differs(now):
                raise BadTask(
                    f"a forward pass changed {place.name}, which the first batch of this attempt "
                    "left alone, or which is no buffer and moves in training_step. Ranks agree "
                    "only on what passes change from the first step on. "
                    "Give it its value in build_model, change it in every forward pass (with a "
                    "weight of 0 where nothing is to change), or change it in after_step or "
                    "on_epoch_end"
                )
            else:
                self._others.refresh([number])

    def before_step(self) -> list[tuple[TensorPlace, torch.Tensor]] | None:
        """Return the places that forward passes change, each with its value from the beginning of
        the step. Return None if a tensor changed whose earlier value is not known.

        This changes nothing. Another thread calls it while the training thread is blocked.
        """
        if not self._is_kept:
            return []
        if self._others.moved() or self._others.differing():
            return None
        return list(zip(self.moving, self._before, strict=True))

    def rehearse(self) -> None:
        """Compare contents once, as ``before_step`` may have to where no kernel can be loaded."""
        self._others.differing()

    def put_back(self) -> list[str]:
        """Undo the changes that forward passes made in a step that was not committed.

        Return the names of the tensors that cannot be restored, or may not have been. A state with
        these tensors belongs to no step.
        """
        torn: list[int] = []
        if self._is_kept:
            torn = self._put_others_back(self._others.moved())
            try:
                self.rewind()
            except RuntimeError:  # a tensor took another shape through its .data
                torn += self._moving
        self._is_kept = False
        return [
            self._places[number].name for number in dict.fromkeys(torn + self._others.differing())
        ]

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
        self._require_others_unchanged()

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

    def _put_others_back(self, numbers: Iterable[int]) -> list[int]:
        """Undo changes of what no pass may change. Return the numbers of those that cannot be."""
        torn = []
        for number in numbers:
            place, kept = self._places[number], self._others.kept(number)
            now = place.tensor
            if not place.is_saved and (now is None or not is_alike(now, kept.form)):
                continue  # it depends on the batch
            if not self._others.put_back(number):
                torn.append(number)
        return torn

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

    def require_unchanged(self) -> None:
        """Raise BadTask if something was changed that no pass may change, without a sign of it.
        Compares contents."""
        self._others.refresh(self._others.moved())  # for example by an optimizer hook
        if names := [self._places[number].name for number in self._others.differing()]:
            raise BadTask(
                f"{', '.join(names)} changed through .data, which ranks cannot follow. Change it "
                "in every forward pass without .data, or in after_step or on_epoch_end"
            )

    def undo_evaluation(self) -> None:
        """Undo what an evaluation changed of what no pass may change, and say so."""
        changed = {*self._others.moved(), *self._others.differing()}
        torn = self._put_others_back(changed)
        names = ", ".join(self._places[number].name for number in sorted(changed))
        if torn:
            raise BadTask(
                f"an evaluation changed {names}, of which no copy is kept because it is large. "
                "Leave it alone in eval mode, or change it in on_epoch_end"
            )
        if names:
            logger.warning(
                "an evaluation changed %s, and that was undone: an evaluation keeps nothing. "
                "Change it in on_epoch_end instead",
                names,
            )


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
