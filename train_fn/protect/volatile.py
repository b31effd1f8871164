"""Tensors that a loop changes before its optimizer steps: buffers, and parameters that are not
trained.

A step that fails has run forward passes. What they changed is put back before the state is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_fn.step.peers import Peers
from train_fn.step.untrained import (
    COPIED_BYTES,
    TensorPlace,
    copy_all,
    is_alike,
    present,
    untrained_places,
)

_Mark = tuple[int, int]
_COMPARED = 2
"""Commits in which contents are compared."""


class Volatile:
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
        self._copies: dict[int, torch.Tensor] = {}
        self._tensors: list[torch.Tensor | None] = []
        self._marks: list[_Mark] = []
        self._moved: set[int] = set()
        """Numbers of the places that are known to change."""
        self._num_compared = 0
        self.renew()

    def renew(self) -> None:
        """Begin with the present values, once a state is loaded."""
        left = COPIED_BYTES
        self._num_compared = 0
        self._look()
        for number, tensor in enumerate(self._tensors):
            if tensor is not None and (number in self._moved or tensor.nbytes <= left):
                left -= tensor.nbytes
                self._copies[number] = tensor.detach().clone()

    def commit(self, *, of_step: bool = True) -> None:
        """Take the present values as those of the committed step; with a step that was just made,
        contents may be compared."""
        moved = self._differing()
        if of_step and self._num_compared < _COMPARED:
            self._num_compared += 1
            moved += self._silently_changed()
        if not self._moved.issuperset(moved):
            modules = {self._places[number].module for number in moved}
            self._moved.update(moved)
            self._moved.update(
                number for number, place in enumerate(self._places) if place.module in modules
            )
        if not self._moved:
            return
        to, source = [], []
        for number in self._moved:
            tensor, copy = self._places[number].tensor, self._copies.get(number)
            if tensor is None:
                self._copies.pop(number, None)
            elif copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                self._copies[number] = tensor.detach().clone()
            else:
                to.append(copy)
                source.append(tensor.detach())
        copy_all(to, source)
        self._look()

    @property
    def is_on_gpu(self) -> bool:
        """Return whether some that change are on a GPU."""
        return any(copy.is_cuda for copy in self._copies.values())

    def has_changed(self) -> bool:
        """Return whether such tensors differ from the last commit, as far as that is seen. Values
        on a GPU are not looked at."""
        return bool(self._differing()) or any(
            not tensor.is_cuda and not torch.equal(tensor, self._copies[number])
            for number in self._moved & self._copies.keys()
            if (tensor := self._places[number].tensor) is not None
            and is_alike(tensor, self._copies[number])
        )

    def put_back(self) -> list[str]:
        """Restore the values of the last commit. Return the names of tensors that changed since and
        have no copy."""
        # Before the first commit every copy is of the state that was loaded.
        known = self._moved if self._num_compared else {*self._moved, *self._copies}
        unknown = {*self._differing(), *self._silently_changed()} - known
        lost = [
            number
            for number in known
            if (copy := self._copies.get(number)) is None
            or (tensor := self._places[number].tensor) is None
            or not is_alike(tensor, copy)
        ]
        if unknown or lost:
            return [self._places[number].name for number in sorted({*unknown, *lost})]
        with torch.no_grad():
            for number in known:
                present(self._places[number]).copy_(self._copies[number])
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

    def _differing(self) -> list[int]:
        now = [place.tensor for place in self._places]
        marks = [_mark(tensor) for tensor in now]
        if marks == self._marks and all(
            one is other for one, other in zip(now, self._tensors, strict=True)
        ):
            return []
        return [
            number
            for number, (tensor, mark) in enumerate(zip(now, marks, strict=True))
            if tensor is not self._tensors[number] or mark != self._marks[number]
        ]

    def _silently_changed(self) -> list[int]:
        """Return those with other contents than their copies, though nothing says that they
        changed."""
        return [
            number
            for number, copy in self._copies.items()
            if number not in self._moved
            and (tensor := self._places[number].tensor) is not None
            and not torch.equal(tensor, copy)
        ]

    def _look(self) -> None:
        self._tensors = [place.tensor for place in self._places]
        self._marks = [_mark(tensor) for tensor in self._tensors]


def _mark(tensor: torch.Tensor | None) -> _Mark:
    return (-1, 0) if tensor is None else (tensor._version, tensor.data_ptr())


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
