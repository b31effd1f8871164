"""Pack a small model's optimizer moments into few tensors. Writing these takes a fifth of the time.

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
"""Larger states are not packed: another copy would cost more than writing many tensors."""


class Packer:
    """Pack one optimizer's values of all parameters into one flat tensor for each name, if they are
    alike and small.

    Describing one tensor in Python takes as long as writing 50 kB. For a small model's moments this
    is most of a checkpoint's time. The layout is computed once and reused while the tensors are
    the same objects.
    """

    def __init__(self) -> None:
        self._flat: _Flat | None = None

    def packed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's ``state_dict`` with its current values packed.

        Returns:
            ``state`` unchanged if it cannot be packed. Otherwise its entry ``state`` is replaced by
            ``flat``, with ``parameters`` (their numbers), ``values`` (for each name, one tensor
            with the values of all parameters in sequence) and ``shapes`` (for each name, the shapes
            as JSON). The next call overwrites ``values``.
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
    """Hold flat tensors, and views of them for the values of each parameter."""

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
        """Return whether these are the same tensors that this was built for, with the same shapes
        and dtypes."""
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
    """Return the ``state_dict`` that ``Packer.packed`` was given, with separate tensors."""
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
    """Return the values of all parameters by name; empty if the parameters' names differ."""
    rows = list(values.values())
    names = list(rows[0]) if rows else []
    if any(list(row) != names for row in rows):
        return {}
    return {name: [row[name] for row in rows] for name in names}


def _are_alike(columns: dict[str, list[Any]]) -> bool:
    """Return whether the values of each name fit in one flat tensor, and are small in all."""
    alike = bool(columns) and all(map(_is_alike, columns.values()))
    return alike and sum(sum(map(_nbytes, column)) for column in columns.values()) <= FLAT_BYTES


def _is_alike(column: list[Any]) -> bool:
    """Return whether these are plain floating-point tensors that one flat tensor can hold."""
    if set(map(type, column)) != {torch.Tensor}:
        return False
    [(dtype, _, layout, requires_grad), *others] = set(map(_kind, column))
    return not others and dtype.is_floating_point and layout is torch.strided and not requires_grad
