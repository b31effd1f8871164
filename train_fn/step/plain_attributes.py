"""Find and restore the plain attributes of modules and of the task that a first pass changes. No
state holds them."""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, dict, set, deque)
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        lambda own: own.bit_generator.state,
        lambda own, state: setattr(own.bit_generator, "state", state),
    ),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
}
"""Types of random generators that a module may own, which Everstep does not seed, with functions
that get and set their states."""
_MAX_ELEMENTS = 256
_MAX_TENSOR_BYTES = 1 << 20
_OWN_TO_MODULES = frozenset(vars(nn.Module()))
_ABSENT = object()


class _State:
    """Hold a copy of a generator's state."""

    def __init__(self, state: Any) -> None:
        self.state = copy.deepcopy(state)
        self.text = repr(state.tolist()) if isinstance(state, torch.Tensor) else pickle.dumps(state)


class PlainAttributes:
    """Copy the plain attributes of ``owners``: numbers, strings, tensors, small containers of
    these, and random generators.

    Args:
        owners: objects by the name to use for them.
    """

    def __init__(self, owners: dict[str, object]) -> None:
        self._owners = {
            name: owner
            for name, owner in owners.items()
            if not type(owner).__module__.startswith("torch.")
        }
        self._before = {name: _values_of(owner) for name, owner in self._owners.items()}
        self._keys = {name: set(vars(owner)) for name, owner in self._owners.items()}

    def changed(self) -> list[str]:
        """Return the names of attributes that have changed, or were added or removed."""
        return [
            f"{name}.{key}".strip(".")
            for name, owner in self._owners.items()
            for key in self._changed(name, owner)
        ]

    def put_back(self) -> None:
        """Restore the earlier value of every attribute."""
        for name, owner in self._owners.items():
            for key in self._changed(name, owner):
                if key in self._before[name]:
                    vars(owner)[key] = _restored(*self._before[name][key])
                else:
                    del vars(owner)[key]

    def _changed(self, name: str, owner: object) -> list[str]:
        before, now = self._before[name], _values_of(owner)
        changed = [
            key
            for key, (_, value) in before.items()
            if key in now and not _is_same(value, now[key][1])
        ]
        gone = [key for key in before if key not in vars(owner)]
        return changed + gone + [key for key in now if key not in self._keys[name]]


def _values_of(owner: object) -> dict[str, tuple[Any, Any]]:
    """Return each plain attribute of ``owner`` with a copy of it, by name."""
    internal = _OWN_TO_MODULES if isinstance(owner, nn.Module) else ()
    named = (
        (key, value, _copied(value)) for key, value in vars(owner).items() if key not in internal
    )
    return {key: (value, copied) for key, value, copied in named if copied is not _ABSENT}


def _copied(value: Any) -> Any:
    """Return a copy of a plain value; _ABSENT for any other."""
    if type(value) in _PLAIN:
        return value
    if type(value) is torch.Tensor:  # not a parameter, and no part of a graph
        is_fit = (
            value.grad_fn is None
            and value.layout is torch.strided
            and value.nbytes <= _MAX_TENSOR_BYTES
        )
        return value.detach().clone() if is_fit else _ABSENT
    if type(value) in _GENERATORS:
        return _State(_GENERATORS[type(value)][0](value))
    if type(value) not in _CONTAINERS or len(value) > _MAX_ELEMENTS:
        return _ABSENT
    parts = [_copied(part) for part in (value.values() if isinstance(value, dict) else value)]
    if any(part is _ABSENT or isinstance(part, _State) for part in parts) or (
        isinstance(value, dict) and not all(type(key) in _PLAIN for key in value)
    ):
        return _ABSENT
    if isinstance(value, dict):
        return dict(zip(value, parts, strict=True))
    return deque(parts, value.maxlen) if isinstance(value, deque) else type(value)(parts)


def _is_same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, _State):
        return bool(first.text == second.text)
    if isinstance(first, torch.Tensor):
        return (
            first.shape == second.shape
            and first.dtype == second.dtype
            and torch.equal(first, second)
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(
            _is_same(first[key], second[key]) for key in first
        )
    if isinstance(first, list | tuple | deque):
        return len(first) == len(second) and all(map(_is_same, first, second))
    return bool(first == second) or (first != first and second != second)


@torch.no_grad()
def _restored(value: Any, copied: Any) -> Any:
    """Return the original object with its earlier contents if it is mutable, else the copy."""
    if isinstance(copied, _State):
        _GENERATORS[type(value)][1](value, copied.state)
        return value
    copied = copy.deepcopy(copied)
    if (
        isinstance(value, torch.Tensor)
        and value.shape == copied.shape
        and value.dtype == copied.dtype
    ):
        value.copy_(copied)
    elif isinstance(value, list):
        value[:] = copied
    elif isinstance(value, dict | set | deque):
        value.clear()
        value.extend(copied) if isinstance(value, deque) else value.update(copied)
    else:
        return copied
    return value
