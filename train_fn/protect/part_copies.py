"""Copies of what a loop may change without its optimizer: schedulers, extras, the optimizers'
options, and which weights are trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from train_fn.protect.arguments import LoopParts
from train_fn.state.tensor_tree import copy_to_cpu, size_bytes, take_apart

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
        self._states: dict[str, Any] = {}
        self._marks: dict[str, list[tuple[int, int]]] = {}
        self._groups: dict[str, list[dict[str, Any]]] = {}
        self._trained: list[bool] = []
        self._large: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Note the parts for the first time, once a state is loaded."""
        states = self.live()
        self._large = frozenset(
            name for name, value in states.items() if size_bytes(value) > _COPIED_BYTES
        )
        self.note()

    def live(self) -> dict[str, Any]:
        """Return the present state of every scheduler and extra."""
        return {name: part.state_dict() for name, part in self._parts.others.items()}

    def holds(self, name: str) -> bool:
        """Return whether a copy of this part is kept."""
        return name in self._states

    def note(self) -> None:
        """Take the present values."""
        states = self.live()
        self._states = copy_to_cpu(
            {name: value for name, value in states.items() if name not in self._large},
            self._states,
        )
        self._marks = {name: _marks(states[name]) for name in self._large}
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
        state = self._parts.others[name].state_dict()
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
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]
