"""What a loop changes without its optimizer, and what the state of the last commit holds of it.

First the tensors that change before the optimizer steps: buffers, and parameters that are not
trained. A step that fails has run forward passes; what they changed is put back before the state
is left. Then the parts that change between two steps, and marks of the trained weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_fn.protect.arguments import LoopParts
from train_fn.state.sharded import localized
from train_fn.state.tensor_tree import copy_to_cpu, size_bytes, take_apart
from train_fn.step.peers import Peers
from train_fn.step.trial import with_extra_state
from train_fn.step.untrained import (
    TensorPlace,
    TensorWatch,
    copy_all,
    is_alike,
    marks_of,
    present,
    untrained_places,
)

_COMPARED = 2
"""Commits in which contents are compared."""


class MovingTensors:
    """Keep the values that such tensors had at the last commit.

    Those that are known to change are copied at every commit. A change is noticed by version
    counter and data pointer, and in the first commits by contents, since torch's BatchNorm writes
    its statistics without a trace. If one buffer of a module changes, all of them count as such.
    """

    def __init__(self, models: Mapping[str, nn.Module], trained: Iterable[torch.Tensor]) -> None:
        trained = list(trained)
        seen: set[int] = set()
        self._places: list[TensorPlace] = []
        for prefix, model in models.items():
            for place in untrained_places(model, trained):
                tensor = place.tensor
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    self._places.append(dataclasses.replace(place, name=prefix + place.name))
        self._moved: set[int] = set()
        """Numbers of the places that are known to change."""
        self.renew()

    def renew(self) -> None:
        """Begin with the present values, once a state is loaded."""
        self._num_compared = 0
        self._watch = TensorWatch(dict(enumerate(self._places)), copied=self._moved)

    def commit(self, *, of_step: bool = True) -> None:
        """Take the present values as those of the committed step; with a step that was just made,
        contents may be compared."""
        moved = self._watch.moved()
        if of_step and self._num_compared < _COMPARED:
            self._num_compared += 1
            moved += self._watch.differing()
        if not self._moved.issuperset(moved):
            modules = {self._places[number].module for number in moved}
            self._moved.update(moved)
            self._moved.update(
                number for number, place in enumerate(self._places) if place.module in modules
            )
        if self._moved:
            self._watch.refresh(self._moved, copied=True)

    @property
    def moves(self) -> bool:
        """Return whether some are known to change."""
        return bool(self._moved)

    @property
    def is_on_gpu(self) -> bool:
        """Return whether some that change are on a GPU."""
        return any(copy.is_cuda for copy in self._watch.copies().values())

    def has_changed(self) -> bool:
        """Return whether such tensors differ from the last commit, as far as that is seen. Values
        on a GPU are not looked at."""
        copies = self._watch.copies()
        return bool(self._watch.moved()) or any(
            not tensor.is_cuda and not torch.equal(tensor, copies[number])
            for number in self._moved & copies.keys()
            if (tensor := self._places[number].tensor) is not None
            and is_alike(tensor, copies[number])
        )

    def put_back(self) -> list[str]:
        """Restore the values of the last commit. Return the names of tensors that changed since and
        have no copy."""
        copies = self._watch.copies()
        # Before the first commit every copy is of the state that was loaded.
        known = self._moved if self._num_compared else {*self._moved, *copies}
        unknown = {*self._watch.moved(), *self._watch.differing()} - known
        lost = [
            number
            for number in known
            if (copy := copies.get(number)) is None
            or (tensor := self._places[number].tensor) is None
            or not is_alike(tensor, copy)
        ]
        if unknown or lost:
            return [self._places[number].name for number in sorted({*unknown, *lost})]
        with torch.no_grad():
            for number in known:
                present(self._places[number]).copy_(copies[number])
        return []

    def unsaved(self) -> dict[str, torch.Tensor]:
        """Return the buffers that have changed and that no ``state_dict`` contains, by name."""
        return {
            place.name: place.tensor
            for place in map(self._places.__getitem__, sorted(self._moved))
            if not place.is_saved and place.tensor is not None
        }

    def load_unsaved(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Load what ``unsaved`` returned."""
        for number, place in enumerate(self._places):
            if place.name in saved and place.tensor is not None:
                self._moved.add(number)
                copy_all([place.tensor], [saved[place.name].to(place.tensor.device)])


class SharedBuffers:
    """Give every rank the buffers of rank 0, as DDP does when the next forward pass begins.

    Between two steps the state must be the same on all ranks, whichever of them survives. A model
    whose DDP does not broadcast its buffers is left alone.
    """

    def __init__(self, wrapped: Iterable[nn.Module], peers: Peers) -> None:
        self._peers = peers
        self._by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        self.follow(wrapped)

    def follow(self, wrapped: Iterable[nn.Module]) -> None:
        """Share the buffers of these models from now on."""
        self._by_dtype = {}
        for module in wrapped:
            if not isinstance(module, DistributedDataParallel) or not module.broadcast_buffers:
                continue
            for name, buffer in module.module.named_buffers():
                if name not in module.parameters_to_ignore:
                    self._by_dtype.setdefault(buffer.dtype, []).append(buffer)

    @torch.no_grad()
    def share(self) -> None:
        """Overwrite the buffers with those of rank 0. A collective."""
        if self._peers.alone:
            return
        started = []
        for buffers in self._by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            started.append((buffers, flat, self._peers.start_broadcast(flat, 0)))
        for buffers, flat, work in started:
            if work is not None:
                work.wait()
            if self._peers.rank:
                parts = torch.split(flat, [buffer.numel() for buffer in buffers])
                views = [part.view_as(one) for part, one in zip(parts, buffers, strict=True)]
                copy_all(buffers, views)


# ---------------------------------------------------------------- parts

# Copies of what a loop may change without its optimizer: schedulers, extras, the optimizers'
# options, and which weights are trained.

OPTIONS = "the optimizer's options"
FROZEN = "which weights are trained"
_COPIED_BYTES = 1 << 20
"""Parts with at most so many bytes of tensors are copied; larger ones are only watched."""


class PartCopies:
    """Hold the parts as they were when they were noted last."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._weights = [
            (prefix + name, value)
            for prefix, model in parts.models.items()
            for name, value in model.named_parameters()
        ]
        self._with_extra = with_extra_state(
            {
                f"{(prefix + name).rstrip('.')}._extra_state".lstrip("."): module
                for prefix, model in parts.models.items()
                for name, module in model.named_modules(remove_duplicate=False)
            }
        )
        self.extra: dict[str, Any] = {}
        """Extra states of modules as noted, by their names in the ``state_dict``: forward passes
        may change them."""
        self._states: dict[str, Any] = {}
        self._marks: dict[str, list[tuple[int, int]]] = {}
        self._groups: dict[str, list[dict[str, Any]]] = {}
        self._trained: list[bool] = []
        self._large: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Note the parts for the first time, once a state is loaded."""
        states = localized(self.live())
        self._large = frozenset(
            name for name, value in states.items() if size_bytes(value) > _COPIED_BYTES
        )
        self.note()

    def live(self) -> dict[str, Any]:
        """Return the present state of every scheduler and extra."""
        return {name: part.state_dict() for name, part in self._parts.others.items()}

    def note(self) -> None:
        """Take the present values."""
        states = localized(self.live())
        self._states = copy_to_cpu(
            {name: value for name, value in states.items() if name not in self._large},
            self._states,
        )
        self._marks = {name: _marks(states[name]) for name in self._large}
        self.extra = {
            name: copy.deepcopy(module.get_extra_state())
            for name, module in self._with_extra.items()
        }
        self._groups = copy_to_cpu(self._live_groups())
        self._trained = [value.requires_grad for _, value in self._weights]

    def changed(self, among: Iterable[str] | None = None) -> list[str]:
        """Return the names of schedulers and extras that differ from what was noted.

        Args:
            among: look at these only; by default at all but loaders, which read ahead.
        """
        if among is None:
            among = self._parts.others.keys() - self._parts.loaders
        return [name for name in sorted(among) if self._has_changed(name)]

    def changed_options(self) -> list[str]:
        """Return OPTIONS and FROZEN, if they differ from what was noted."""
        trained = [value.requires_grad for _, value in self._weights]
        return [
            *([] if is_same(self._groups, self._live_groups()) else [OPTIONS]),
            *([] if trained == self._trained else [FROZEN]),
        ]

    def torn(self) -> list[str]:
        """Return the parts that have changed without a copy."""
        return self.changed(self._large)

    def states(self) -> dict[str, Any]:
        """Return the state of every scheduler and extra as noted, of large ones as they are."""
        large = {name: self._parts.others[name].state_dict() for name in self._large}
        found = {**large, **self._states}
        return {name: found[name] for name in self._parts.others}

    def of_optimizer(self, name: str) -> dict[str, Any]:
        """Return an optimizer's present ``state_dict`` with the options that were noted."""
        state: dict[str, Any] = self._parts.optimizers[name].state_dict()
        groups = zip(state["param_groups"], self._groups[name], strict=True)
        return {**state, "param_groups": [{**group, **noted} for group, noted in groups]}

    def frozen(self, *, noted: bool) -> list[str]:
        """Return the names of weights that are not trained: as noted, or at present."""
        now = [value.requires_grad for _, value in self._weights]
        flags = self._trained if noted else now
        return [name for (name, _), flag in zip(self._weights, flags, strict=True) if not flag]

    def freeze(self, frozen: Iterable[str]) -> None:
        """Let all weights but these be trained."""
        names = set(frozen)
        for name, value in self._weights:
            if value.requires_grad == (name in names) and value.is_floating_point():
                value.requires_grad_(name not in names)

    def _has_changed(self, name: str) -> bool:
        state = localized(self._parts.others[name].state_dict())
        if name in self._large:
            return _marks(state) != self._marks[name]
        # One copy waits once for a GPU, not for each tensor.
        return not is_same(self._states[name], copy_to_cpu(state) if _on_gpu(state) else state)

    def _live_groups(self) -> dict[str, Any]:
        return {
            name: [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            for name, optimizer in self._parts.optimizers.items()
        }


def _on_gpu(state: Any) -> bool:
    tensors: list[torch.Tensor] = []
    take_apart(state, tensors)
    return any(tensor.is_cuda for tensor in tensors)


def is_same(noted: Any, now: Any) -> bool:
    """Return whether nested values are equal. ``noted`` is a copy, which has plain types."""
    if isinstance(noted, torch.Tensor):
        return (
            isinstance(now, torch.Tensor)
            and noted.shape == now.shape
            and noted.dtype == now.dtype
            and _has_same_values(noted, now.detach().to(noted.device))
        )
    if isinstance(noted, dict):
        return (
            isinstance(now, dict)
            and len(noted) == len(now)
            and all(name in now and is_same(value, now[name]) for name, value in noted.items())
        )
    if isinstance(noted, list | tuple):
        return (
            isinstance(now, list | tuple)
            and len(noted) == len(now)
            and all(map(is_same, noted, now))
        )
    return bool(noted == now) or (noted != noted and now != now)


def _has_same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() or not torch.equal(one.isnan(), other.isnan()):
        return False
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _marks(state: Any) -> list[tuple[int, int]]:
    tensors: list[torch.Tensor] = []
    take_apart(state, tensors)
    return marks_of(tensors)


# ---------------------------------------------------------------- weights mark

# Whether a loop has changed trained weights since its last commit, as an evaluation does that
# swaps them for an average: such weights must not be left as those of a step.

_SAMPLED = 8
"""Tensors of which the first values are compared: code that writes to ``weight.data`` leaves no
trace in version counters."""
_VALUES = 4


class WeightsMark:
    """Note the trained weights at a commit in microseconds, and compare them when a rank leaves."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = list(weights)
        filled = [weight for weight in self._weights if weight.numel()]
        self._sampled = filled[:: max(1, len(filled) // _SAMPLED)][:_SAMPLED]
        self._versions: list[int] = []
        self._values: list[torch.Tensor] = []

    def note(self) -> None:
        """Take the present weights as those of the commit."""
        self._versions = [weight._version for weight in self._weights]
        self._values = [_first(weight).clone() for weight in self._sampled]

    def seems_changed(self) -> bool:
        """Return the same as ``has_changed``, but look at no values that are on a GPU: each step
        would wait for them."""
        if any(value.is_cuda for value in self._values):
            return self._versions != [weight._version for weight in self._weights]
        return self.has_changed()

    def has_changed(self) -> bool:
        """Return whether weights are others than at the last commit, as far as the mark shows."""
        if self._versions != [weight._version for weight in self._weights]:
            return True
        return not all(
            torch.equal(value, _first(weight))
            for value, weight in zip(self._values, self._sampled, strict=True)
        )


def _first(weight: torch.Tensor) -> torch.Tensor:
    row = weight.detach()
    while row.dim() > 1:
        row = row[0]
    return row.reshape(-1)[:_VALUES]
