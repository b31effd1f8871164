"""An optimizer's moments as few tensors, for small models: they are written in a fifth of the time.

``unpacked`` reads both forms.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from typing import Any

import torch

_kind = operator.attrgetter("dtype", "device", "layout", "requires_grad")
_form = operator.attrgetter("shape", "dtype")
_nbytes = operator.attrgetter("nbytes")

FLAT_BYTES = 64 << 20
"""Larger states are left as they are: one more copy of them would cost more than their many tensors
do."""


class Packer:
    """Gathers one optimizer's values for all parameters in one flat tensor of each kind, where they
    are alike and small.

    To describe a tensor is Python, as much of it as to write 50 kB: of a small model's moments that
    is most of a checkpoint. How they lie is found out once, and holds as long as they are the same
    objects.
    """

    def __init__(self) -> None:
        self._flat: _Flat | None = None

    def packed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's ``state_dict``, its values as they are now.

        Returns:
            In place of ``state`` the entry ``flat``: ``parameters``, their numbers; ``values``, by
            name one tensor with the values of all parameters one behind the other, which the next
            call overwrites; ``shapes``, by name those of each, as JSON. Others come back as they
            are.
        """
        columns = _columns(state["state"])
        if self._flat is None or not self._flat.is_of(columns):
            self._flat = _Flat(columns) if _are_alike(columns) else None
        if self._flat is None:
            return state
        flat = {
            "parameters": list(state["state"]),
            "values": self._flat.filled(),
            "shapes": dict(self._flat.shapes),
        }
        return {**{name: value for name, value in state.items() if name != "state"}, "flat": flat}


class _Flat:
    """Flat tensors, and where in them the values of each parameter lie."""

    def __init__(self, columns: dict[str, list[torch.Tensor]]) -> None:
        self._names = list(columns)
        self._sources = list(itertools.chain(*columns.values()))
        self._forms = list(map(_form, self._sources))
        self._values = {
            name: column[0].new_empty(sum(map(torch.numel, column)))
            for name, column in columns.items()
        }
        parts = [
            torch.split(self._values[name], [value.numel() for value in column])
            for name, column in columns.items()
        ]
        self._targets = [
            part.view(value.shape)
            for part, value in zip(itertools.chain(*parts), self._sources, strict=True)
        ]
        self.shapes = {
            name: json.dumps([value.shape for value in column]) for name, column in columns.items()
        }

    def is_of(self, columns: dict[str, list[Any]]) -> bool:
        """Whether these are the values that it was made for, and of the same shapes and kinds."""
        values = list(itertools.chain(*columns.values()))
        return (
            list(columns) == self._names
            and len(values) == len(self._sources)
            and all(map(operator.is_, values, self._sources))
            and list(map(_form, values)) == self._forms
        )

    @torch.no_grad()
    def filled(self) -> dict[str, torch.Tensor]:
        torch._foreach_copy_(self._targets, self._sources)
        return dict(self._values)


def unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """What ``Packer.packed`` was given, with tensors of their own."""
    if "flat" not in state:
        return state
    flat = state["flat"]
    values: dict[Any, dict[str, torch.Tensor]] = {number: {} for number in flat["parameters"]}
    for name, text in flat["shapes"].items():
        shapes = json.loads(text)
        parts = torch.split(flat["values"][name], [math.prod(shape) for shape in shapes])
        for number, part, shape in zip(values, parts, shapes, strict=True):
            values[number][name] = part.view(shape).clone()
    return {**{name: value for name, value in state.items() if name != "flat"}, "state": values}


def _columns(values: dict[Any, dict[str, Any]]) -> dict[str, list[Any]]:
    """By name the values of all parameters; none where parameters have other names."""
    rows = list(values.values())
    names = list(rows[0]) if rows else []
    if any(list(row) != names for row in rows):
        return {}
    return {name: [row[name] for row in rows] for name in names}


def _are_alike(columns: dict[str, list[Any]]) -> bool:
    """Whether values can lie in a flat tensor of each name, and are small."""
    alike = bool(columns) and all(map(_is_alike, columns.values()))
    return alike and sum(sum(map(_nbytes, column)) for column in columns.values()) <= FLAT_BYTES


def _is_alike(column: list[Any]) -> bool:
    """Whether these are plain tensors of numbers that one flat tensor can hold."""
    if set(map(type, column)) != {torch.Tensor}:
        return False
    [(dtype, _, layout, requires_grad), *others] = set(map(_kind, column))
    return not others and dtype.is_floating_point and layout is torch.strided and not requires_grad
