"""Find which tensors a model changes without its optimizer: buffers and parameters that are not
trained.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from train_fn.errors import BadTask, few

COPIED_BYTES = 64 << 20
"""Limit on the total size of copies of tensors that are not known to change. A tensor that does not
fit under it is sampled instead."""
_SEEN_BYTES = 1 << 20
_SAMPLED = 256
"""Approximate number of elements in a sample."""


@dataclass(frozen=True)
class TensorPlace:
    """Name the attribute of a module that holds a tensor. A forward pass may assign another tensor
    to it (``self.mean = 0.9 * self.mean + …``)."""

    name: str
    """Its qualified name, as in ``named_buffers``."""
    module: nn.Module
    key: str
    is_buffer: bool
    is_saved: bool
    """Whether the model's ``state_dict`` contains the tensor."""

    @property
    def holder(self) -> dict[str, torch.Tensor | None]:
        return self.module._buffers if self.is_buffer else self.module._parameters  # type: ignore[return-value]

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.holder[self.key]


def untrained_places(model: nn.Module, trained: Iterable[torch.Tensor]) -> list[TensorPlace]:
    """Return the places of all tensors that are not in ``trained`` and share no memory with it.
    Tensors that are sharded over ranks are left out: they have no memory of their own.

    Each tensor appears once, in the order of ``named_modules``.
    """
    taken = {
        parameter.untyped_storage().data_ptr()
        for parameter in trained
        if not _is_sharded(parameter)
    }
    seen: set[int] = set()
    is_saved = _saved_by(model)
    places = []
    for prefix, module in model.named_modules():
        for is_buffer, holder in ((True, module._buffers), (False, module._parameters)):
            for key, tensor in holder.items():
                if (
                    tensor is None
                    or id(tensor) in seen
                    or is_lazy(tensor)
                    or tensor.layout is not torch.strided
                    or _is_sharded(tensor)
                ):
                    continue
                seen.add(id(tensor))
                if not tensor.numel() or tensor.untyped_storage().data_ptr() not in taken:
                    name = f"{prefix}.{key}".strip(".")
                    is_kept = is_saved(name, tensor)
                    places.append(TensorPlace(name, module, key, is_buffer, is_kept))
    return places


def _saved_by(model: nn.Module) -> Callable[[str, torch.Tensor], bool]:
    """Return a function that says whether the model's ``state_dict`` has a tensor unchanged. Code
    of the user's may have given it another name there."""
    saved = {
        name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)
    }
    memory = {_memory_of(value) for value in saved.values()}

    def is_saved(name: str, tensor: torch.Tensor) -> bool:
        if _memory_of(tensor) in memory:
            return True
        if (value := saved.get(name)) is None:
            return False
        return not _has_memory(tensor) or is_sampled_alike(value, tensor)

    return is_saved


def is_sampled_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have one type and shape, and the same bits in a sample of their
    elements."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    one, other = (_sample(each).contiguous().view(torch.uint8).cpu() for each in (first, second))
    return torch.equal(one, other)


def require_loaded(model: nn.Module, saved: Mapping[str, Any], source: str) -> None:
    """Raise BadTask if a model has other values than it was given to load, by a sample of each."""
    now = model.state_dict()
    if lost := [
        name
        for name, value in saved.items()
        if isinstance(value, torch.Tensor)
        and _has_memory(value)
        and not (
            isinstance(own := now.get(name), torch.Tensor)
            and is_sampled_alike(own, value.to(own.dtype))
        )
    ]:
        raise BadTask(
            f"{source}: load_state_dict() of the model left out {few(lost)}, so that training "
            "would go on from other values than those of its state. Let it load all that "
            "state_dict() returns"
        )


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a key that a tensor shares with its ``detach()``, if it is not empty."""
    return (tensor.data_ptr(), tensor.numel()) if _has_memory(tensor) else (0, id(tensor))


def _has_memory(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not is_lazy(tensor) and not _is_sharded(tensor)
    return is_plain and tensor.numel() > 0


def require_saved(model: nn.Module, source: str) -> None:
    """Raise BadTask if the model's ``state_dict`` leaves out a parameter that is trained."""
    is_saved = _saved_by(model)
    if lost := [
        name
        for name, value in model.named_parameters()
        if value.requires_grad and not is_saved(name, value)
    ]:
        raise BadTask(
            f"{source}: the model's state_dict() leaves out {few(lost)}, or has it with other "
            f"values, and {'it is' if len(lost) == 1 else 'they are'} trained: no checkpoint would "
            "hold it. Let state_dict() return all that is trained, as it is"
        )


def is_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether one tensor can be copied into the other: same shape, and either the same dtype
    or both floating point."""
    same_kind = first.dtype == second.dtype or (
        first.is_floating_point() and second.is_floating_point()
    )
    return first.shape == second.shape and same_kind


def copy_all(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """Copy each tensor of ``source`` into the one at its place in ``to``."""
    # A GPU copies a whole list in one kernel only if all of its tensors have one type.
    lists: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for there, here in zip(to, source, strict=True):
        written, read = lists.setdefault((there.dtype, here.dtype), ([], []))
        written.append(there)
        read.append(here)
    with torch.no_grad():
        for written, read in lists.values():
            torch._foreach_copy_(written, read)


def shape_fault(
    place: TensorPlace, now: torch.Tensor | None, before: torch.Tensor | None
) -> BadTask | None:
    """Return the error for replacing ``before`` by ``now`` at ``place``; None if that is allowed.

    It is allowed if both are ``is_alike``, or if the ``state_dict`` does not contain the tensor.
    """
    fits = now is before or (now is not None and before is not None and is_alike(now, before))
    if fits or not place.is_saved:
        return None
    return BadTask(
        f"the forward pass replaced {place.name}, {_described(before)}, by {_described(now)}. No "
        "checkpoint could be loaded with "
        "it. Give it its final shape in build_model, or register it with persistent=False if it "
        "follows from the batch"
    )


def _described(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"a {tensor.dtype} of shape {tuple(tensor.shape)}"


class EarlierValue(NamedTuple):
    """Hold an earlier value of a tensor: a copy, a sample of a large one's elements, or both."""

    tensor: torch.Tensor
    form: torch.Tensor
    """A meta tensor with its shape and dtype, since a write to ``tensor.data`` may change both."""
    copy: torch.Tensor | None
    sample: torch.Tensor | None

    @torch.no_grad()
    def differs(self, now: torch.Tensor) -> bool:
        """Return whether ``now`` has another shape or other contents."""
        if now.shape != self.form.shape:
            return True
        if self.sample is not None:
            return not torch.equal(_sample(now), self.sample)
        assert self.copy is not None
        return not torch.equal(now.detach(), self.copy)


def keep(tensors: Iterable[torch.Tensor], limit_bytes: float = COPIED_BYTES) -> list[EarlierValue]:
    """Copy tensors until their copies take ``limit_bytes`` in all; sample those that do not fit."""
    kept, left = [], limit_bytes
    for tensor in tensors:
        form = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if tensor.nbytes <= left:
            left -= tensor.nbytes
            kept.append(EarlierValue(tensor, form, tensor.detach().clone(), None))
        else:
            kept.append(EarlierValue(tensor, form, None, _sample(tensor)))
    return kept


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLED)].clone()


class TensorWatch:
    """Detect which tensors at the given places changed, by version counter and data pointer.

    A write through ``tensor.data`` changes neither. ``differing`` finds it by comparing contents.

    Args:
        copied: numbers of places of which copies are kept, however large they are.
    """

    def __init__(self, places: dict[int, TensorPlace], copied: Collection[int] = ()) -> None:
        self._places = places
        there = {number: place.tensor for number, place in places.items()}
        large = {at: each for at, each in there.items() if each is not None and at in copied}
        others = {at: each for at, each in there.items() if each is not None and at not in copied}
        kept = {
            **dict(zip(large, keep(large.values(), math.inf), strict=True)),
            **dict(zip(others, keep(others.values()), strict=True)),
        }
        self._kept = {number: kept[number] for number in places if number in kept}
        self._look()

    def moved(self) -> list[int]:
        """Return the numbers of places whose tensor has another version or data pointer than
        before, or was replaced by another tensor."""
        if not self._tensors:
            return []
        now = [holder[key] for holder, key in self._slots]
        marks = marks_of(self._tensors)
        if marks == self._marks and all(map(operator.is_, now, self._tensors)):
            return []
        before = zip(self._tensors, self._marks, strict=True)
        return [
            number
            for number, tensor, mark, (was, its_mark) in zip(
                self._kept, now, marks, before, strict=True
            )
            if tensor is not was or mark != its_mark
        ]

    def differing(self) -> list[int]:
        """Return the numbers of places whose tensor has other contents than before."""
        return [number for number, kept in self._kept.items() if kept.differs(kept.tensor)]

    def unsaved_changes(self) -> list[int]:
        """Return the numbers of places that the model's ``state_dict`` leaves out, and that have
        other contents than before."""
        unsaved = {
            number: place.tensor
            for number, place in self._places.items()
            if not place.is_saved and number in self._kept
        }
        return [
            number
            for number, now in unsaved.items()
            if now is not None
            and is_alike(now, self._kept[number].form)
            and self._kept[number].differs(now)
        ]

    def copies(self) -> dict[int, torch.Tensor]:
        """Return the copies of the baseline, by number, where some are kept."""
        return {number: kept.copy for number, kept in self._kept.items() if kept.copy is not None}

    def refresh(self, numbers: Iterable[int], *, copied: bool = False) -> None:
        """Make the current tensors at these places the new baseline. If they are ``copied``, copies
        are kept whatever their size, and a place may be empty."""
        to, source = [], []
        for number in numbers:
            kept, tensor = self._kept.get(number), self._places[number].tensor
            if tensor is None and copied:
                self._kept.pop(number, None)
                continue
            now = present(self._places[number])
            if (
                kept is not None
                and (copy := kept.copy) is not None
                and (copy.shape, copy.dtype) == (now.shape, now.dtype)
            ):
                to.append(copy)
                source.append(now.detach())
                self._kept[number] = kept._replace(tensor=now)
            else:
                has_copy = kept is not None and kept.copy is not None
                limit = math.inf if copied else COPIED_BYTES if has_copy else 0
                [self._kept[number]] = keep([now], limit)
        copy_all(to, source)
        self._look()

    @torch.no_grad()
    def put_back(self, number: int) -> bool:
        """Restore the baseline at this place. Return whether that is possible."""
        kept = self._kept[number]
        self._places[number].holder[self._places[number].key] = kept.tensor
        if kept.copy is None or kept.tensor.shape != kept.copy.shape:
            return False
        kept.tensor.copy_(kept.copy)
        self._look()
        return True

    def kept(self, number: int) -> EarlierValue:
        """Return the baseline at this place."""
        return self._kept[number]

    def drop(self, numbers: Iterable[int]) -> None:
        """Stop watching these places."""
        for number in numbers:
            self._kept.pop(number, None)
        self._look()

    def _look(self) -> None:
        places = [self._places[number] for number in self._kept]
        self._slots = [(place.holder, place.key) for place in places]
        self._tensors = [kept.tensor for kept in self._kept.values()]
        self._marks = marks_of(self._tensors)


def marks_of(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return what changes with a tensor, unless it is written through its ``.data``."""
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]


def present(place: TensorPlace) -> torch.Tensor:
    """Return the tensor at a place where one is known to be."""
    tensor = place.tensor
    assert tensor is not None, f"{place.name} is None"
    return tensor


class WarmUp:
    """Detect by contents what a first pass changes, and undo it.

    Args:
        is_fresh: whether no state is loaded afterwards. If so, large tensors are copied, too, to
            host memory.
    """

    def __init__(
        self,
        model: nn.Module,
        places: list[TensorPlace],
        *,
        is_fresh: bool,
    ) -> None:
        self._places = places
        self._model, self._names = model, _named_in(model)
        self._empty = [
            TensorPlace(name, module, key, True, key not in module._non_persistent_buffers_set)
            for name, (module, key) in self._names.items()
            if key in module._buffers and module._buffers[key] is None
        ]
        self._kept = keep(map(present, places))
        self._marks = marks_of([kept.tensor for kept in self._kept])
        self._seen: dict[int, EarlierValue] = {}
        for at, (place, kept) in enumerate(zip(places, self._kept, strict=True)):
            if kept.copy is None and (is_fresh or not place.is_saved):
                self._kept[at] = kept._replace(copy=kept.tensor.detach().to("cpu", copy=True))

    def look(self) -> tuple[set[int], set[int]]:
        """Return the numbers of places whose tensor changed, and of those to ignore because their
        tensor depends on the batch alone.

        Raise BadTask if a tensor of the model's ``state_dict`` was replaced by one of another
        shape.
        """
        faults = [shape_fault(place, place.tensor, None) for place in self._empty]
        added = [
            name
            for name, (module, key) in _named_in(self._model).items()
            if name not in self._names and key not in module._non_persistent_buffers_set
        ]
        if added:
            faults.append(
                BadTask(
                    f"the forward pass registered {few(added)}, which no checkpoint could be "
                    "loaded with. Register it in build_model, or with "
                    "persistent=False if it follows from the batch"
                )
            )
        moving, ignored = set(), set()
        marks = marks_of([kept.tensor for kept in self._kept])
        for number, (place, kept) in enumerate(zip(self._places, self._kept, strict=True)):
            now = place.tensor
            if now is None or not is_alike(now, kept.form):
                faults.append(shape_fault(place, now, kept.form))
                ignored.add(number)
            elif not place.is_saved and now is not kept.tensor and not kept.differs(now):
                # Each pass creates it from values that training does not change, such as a mask.
                ignored.add(number)
            elif (
                now is not kept.tensor
                or kept.differs(now)
                or marks[number] != self._marks[number]  # written with the same values
            ):
                moving.add(number)
                [self._seen[number]] = keep([now], _SEEN_BYTES)
        for fault in faults:
            if fault is not None:
                raise fault
        return moving, ignored

    def has_moved_again(self) -> bool:
        """Return whether a changed tensor has changed again since the last ``look``. Gradient
        checkpointing, which runs forward passes again, does this."""
        return any(
            (now := self._places[number].tensor) is None or seen.differs(now)
            for number, seen in self._seen.items()
        )

    def changed(self) -> list[str]:
        """Return the names of tensors that have other contents than before."""
        pairs = zip(self._places, self._kept, strict=True)
        return [
            place.name
            for place, kept in pairs
            if (now := place.tensor) is None or kept.differs(now)
        ]

    def changed_without_copy(self) -> list[str]:
        """Return the names of tensors that have changed, by a sample of their elements, and of
        which no copy was kept."""
        return [
            place.name
            for place, kept in zip(self._places, self._kept, strict=True)
            if kept.copy is None and kept.differs(kept.tensor)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore every tensor object, and its contents where a copy was kept."""
        for place, kept in zip(self._places, self._kept, strict=True):
            place.holder[place.key] = kept.tensor
            if kept.copy is not None and kept.differs(kept.tensor):
                if kept.tensor.shape == kept.copy.shape:
                    kept.tensor.copy_(kept.copy)
                else:
                    kept.tensor.data = kept.copy.clone()
        for place in self._empty:
            place.holder[place.key] = None
        for name, (module, key) in _named_in(self._model).items():
            if name not in self._names:
                delattr(module, key)


def _named_in(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and the key of each buffer and parameter, also of empty ones, by name."""
    return {
        f"{prefix}.{key}".strip("."): (module, key)
        for prefix, module in model.named_modules()
        for key in (*module._buffers, *module._parameters)
    }


def with_their_like(places: Sequence[TensorPlace], moving: set[int]) -> set[int]:
    """Return the numbers of the places that forward passes may change, by those that a first pass
    has changed.

    Also the same buffer of every other module of such a class, since blocks may be dropped at
    random; and running statistics of any normalization, which a task may unfreeze later. Tensors of
    float64 are left out while they do not move: a mean of equal values may round.
    """
    like = {
        (type(place.module), place.key)
        for place in (places[at] for at in moving)
        if place.is_buffer and place.tensor is not None and place.tensor.dtype != torch.float64
    }
    return moving | {
        number
        for number, place in enumerate(places)
        if place.is_buffer
        and (
            (type(place.module), place.key) in like
            or (
                isinstance(place.module, _NormBase)
                and place.module.running_mean is not None
                and place.module.running_mean.dtype != torch.float64
            )
        )
    }


# ---------------------------------------------------------------- buffer rules

# Choose which value a step commits for each tensor that forward passes change.
#
# - ``mean``: the mean of the values after each micro-batch, weighted by its samples. So running
#   statistics take one momentum update a step, and ``num_batches_tracked`` counts steps.
# - ``first``: the value after the global batch's first micro-batch. It is used where a mean has no
#   meaning: for integers and booleans, for buffers in the same module as these (a queue and its
#   pointer), and for parameters that are not trained (a teacher's).
#
# A module chooses for all of its tensors by an attribute ``buffers_take = "mean"`` or ``"first"``.

Rule = Literal["mean", "first"]


def rules_of(places: Sequence[TensorPlace]) -> list[Rule]:
    """Return which value the step commits for each of ``places``.

    This depends on what else changes in a tensor's module. Raise BadTask for a module whose
    ``buffers_take`` is neither 'mean' nor 'first'.
    """
    counting = {place.module for place in places if not _is_number(place)}
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


def _is_number(place: TensorPlace) -> bool:
    """Return whether a mean of the tensor's values has a meaning by itself. It has for real
    numbers, and for BatchNorm's count, which every pass increases by one."""
    is_count = place.key == "num_batches_tracked" and isinstance(place.module, _NormBase)
    return present(place).is_floating_point() or is_count


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh")  # importing its class takes half a second
