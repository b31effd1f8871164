"""Put back what a trial pass changes: tensors and extra states of the model, and of modules that
the task holds beside it, and plain attributes of modules and of the task, which no state holds."""

from __future__ import annotations

import copy
import pickle
import random
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from train_fn.step.untrained import TensorPlace, WarmUp, untrained_places

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
_LIBRARIES = frozenset({"builtins", "functools", "numpy", "torch", "threading", "types"})
_MAX_DEPTH = 1
_MAX_ELEMENTS = 256
_MAX_TENSOR_BYTES = 1 << 20
_BYTES_OF_SLOT = struct.calcsize("P")
_OWN_TO_MODULES = frozenset(vars(nn.Module()))
_OWN_TO_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"_opt_called", "step"}
_ABSENT = object()


class TrialPass:
    """What a pass over the model may change that is not to last.

    Args:
        trained: tensors that the optimizer changes.
        is_fresh: as of ``WarmUp``.
    """

    def __init__(
        self, task: object, model: nn.Module, trained: Iterable[torch.Tensor], *, is_fresh: bool
    ) -> None:
        self.places: list[TensorPlace] = untrained_places(model, trained)
        self.warm_up = WarmUp(model, self.places, is_fresh=is_fresh)
        beside = modules_beside(task, model)
        self._beside = {
            name: WarmUp(each, untrained_places(each, ()), is_fresh=False)  # it may be a teacher
            for name, each in beside.items()
        }
        owners: dict[str, object] = dict(model.named_modules())
        for name, each in beside.items():
            owners |= {f"{name}.{inner}".strip("."): part for inner, part in each.named_modules()}
        self.attributes = PlainAttributes({**owners, type(task).__name__: task})
        self._extra = ExtraStates(with_extra_state(owners))

    def changed_beside(self) -> list[str]:
        """Return the names of tensors that have changed in modules beside the model."""
        return [
            f"{name}.{each}" for name, warm_up in self._beside.items() for each in warm_up.changed()
        ]

    def put_back(self) -> list[str]:
        """Put everything back. Return the names of the plain attributes that have changed."""
        for each in (self.warm_up, *self._beside.values()):
            each.put_back()
        changed = self.attributes.changed()
        self.attributes.put_back()
        self._extra.put_back()
        return changed


def with_extra_state(owners: Mapping[str, object]) -> dict[str, nn.Module]:
    """Return those that are modules with a ``get_extra_state`` of their own."""
    return {
        name: each
        for name, each in owners.items()
        if isinstance(each, nn.Module)
        and type(each).get_extra_state is not nn.Module.get_extra_state
    }


class ExtraStates:
    """What ``get_extra_state`` of modules returns, copied."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._before = {
            name: (module, copy.deepcopy(module.get_extra_state()))
            for name, module in modules.items()
        }

    def changed(self) -> list[str]:
        """Return the names of modules whose extra state is another one now."""
        return [
            name
            for name, (module, before) in self._before.items()
            if not _is_same(before, module.get_extra_state())
        ]

    def put_back(self) -> None:
        for name in self.changed():
            module, before = self._before[name]
            module.set_extra_state(before)


def modules_beside(task: object, model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that a task holds, itself or in a list or dict, and that are no part of
    its model, by name."""
    known = {id(each) for each in model.modules()}
    found: dict[str, nn.Module] = {}
    for key, value in getattr(task, "__dict__", {}).items():
        parts = value.values() if isinstance(value, dict) else value
        for each in parts if isinstance(value, dict | list | tuple) else [value]:
            if isinstance(each, nn.Module) and id(each) not in known:
                known |= {id(part) for part in each.modules()}
                found[f"{type(task).__name__}.{key}{len(found) or ''}"] = each
    return found


class _State:
    """Hold a copy of a generator's state."""

    def __init__(self, state: Any) -> None:
        self.state = copy.deepcopy(state)
        self.text = repr(state.tolist()) if isinstance(state, torch.Tensor) else pickle.dumps(state)


class _Object:
    """Hold copies of the plain attributes of an object that a module or the task holds."""

    def __init__(self, owner: object, depth: int) -> None:
        self.kind, self.keys = type(owner), set(vars(owner))
        self.values = _values_of(owner, depth)


class PlainAttributes:
    """Copy the plain attributes of ``owners``: numbers, strings, tensors, random generators, small
    containers of these, and objects with such attributes.

    Args:
        owners: objects by the name to use for them.
    """

    def __init__(self, owners: dict[str, object]) -> None:
        self._owners = owners
        self._before = {name: _Object(owner, 0) for name, owner in owners.items()}

    def changed(self) -> list[str]:
        """Return the names of attributes that have changed, or were added or removed."""
        return [
            f"{name}.{key}".strip(".")
            for name, owner in self._owners.items()
            for key in _changes(self._before[name], _Object(owner, 0))
        ]

    def put_back(self) -> None:
        """Restore the earlier value of every attribute."""
        for name, owner in self._owners.items():
            _put_back(owner, self._before[name], 0)


def _changes(before: _Object, now: _Object) -> list[str]:
    """Return the names of attributes that differ; of an object's attributes with its name."""
    changed = [
        name
        for key, (_, value) in before.values.items()
        if key in now.values
        for name in _differences(key, value, now.values[key][1])
    ]
    gone = [key for key in before.values if key not in now.keys]
    added = [key for key in now.values if key not in before.keys]
    return changed + gone + [key for key in added if not _is_default(now, key)]


def _is_default(now: _Object, key: str) -> bool:
    """Return whether the attribute has the value that the class gives it."""
    default = _copied(getattr(now.kind, key, _ABSENT), _MAX_DEPTH)
    return default is not _ABSENT and _is_same(default, now.values[key][1])


def _differences(key: str, before: Any, now: Any) -> list[str]:
    if isinstance(before, _Object) and isinstance(now, _Object):
        return [f"{key}.{name}" for name in _changes(before, now)]
    return [] if _is_same(before, now) else [key]


def _put_back(owner: object, before: _Object, depth: int) -> None:
    now = _Object(owner, depth)
    for key, (value, copied) in before.values.items():
        if key not in now.keys or (
            key in now.values and _differences(key, copied, now.values[key][1])
        ):
            vars(owner)[key] = _restored(value, copied)
        if isinstance(copied, _Object):
            _put_back(value, copied, depth + 1)
    for key in now.values.keys() - before.keys:
        del vars(owner)[key]


def _values_of(owner: object, depth: int) -> dict[str, tuple[Any, Any]]:
    """Return each plain attribute of ``owner`` with a copy of it, by name."""
    internals = internal(owner)
    named = (
        (key, value, _copied(value, depth))
        for key, value in vars(owner).items()
        if key not in internals
    )
    return {key: (value, copied) for key, value, copied in named if copied is not _ABSENT}


def internal(owner: object) -> Collection[str]:
    """Return the attributes of torch's base class."""
    if isinstance(owner, nn.Module):
        return _OWN_TO_MODULES
    return _OWN_TO_OPTIMIZERS if isinstance(owner, torch.optim.Optimizer) else ()


def _is_object(value: Any) -> bool:
    """Return whether this is an object of the user's with nothing but attributes: no module, class
    or function, and of none of ``_LIBRARIES``."""
    kind = type(value)
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, type | nn.Module | torch.optim.Optimizer)
        and kind.__module__.partition(".")[0] not in _LIBRARIES
        and not (is_built_in(kind) or any(slots_of(kind)))
        and len(vars(value)) <= _MAX_ELEMENTS
    )


def slots_of(kind: type) -> Iterator[str]:
    """Yield the names of the slots of a class, with those that it inherits."""
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield name


def is_built_in(kind: type) -> bool:
    """Return whether objects of a class hold more than attributes and slots: it is written in C, or
    derived from a class that is, as Counter is from dict."""
    most = _State.__basicsize__ + _BYTES_OF_SLOT * len([*slots_of(kind)])
    return kind.__basicsize__ > most or kind.__itemsize__ > 0


def _copied(value: Any, depth: int) -> Any:
    """Return a copy of a plain value; _ABSENT for any other.

    Args:
        depth: 0 for what a module or the task holds itself. Objects are followed one level down.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is torch.Tensor:  # not a parameter, and no part of a graph
        is_fit = (
            value.grad_fn is None
            and value.layout is torch.strided
            and value.nbytes <= _MAX_TENSOR_BYTES
        )
        return value.detach().clone() if is_fit else _ABSENT
    if type(value) is np.ndarray:
        is_fit = not value.dtype.hasobject and value.nbytes <= _MAX_TENSOR_BYTES
        return value.copy() if is_fit else _ABSENT
    if type(value) in _GENERATORS:
        return _State(_GENERATORS[type(value)][0](value))
    if type(value) not in _CONTAINERS or len(value) > _MAX_ELEMENTS:
        is_followed = depth < _MAX_DEPTH and _is_object(value)
        return _Object(value, depth + 1) if is_followed else _ABSENT
    parts = [
        _copied(part, _MAX_DEPTH) for part in (value.values() if isinstance(value, dict) else value)
    ]
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
    if isinstance(first, np.ndarray):
        is_alike = first.dtype == second.dtype and first.shape == second.shape
        return bool(is_alike and first.tobytes() == second.tobytes())
    if isinstance(first, dict):
        return list(first) == list(second) and all(
            _is_same(first[key], second[key]) for key in first
        )
    if isinstance(first, list | tuple | deque):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if first == second or (first != first and second != second):
        return True
    is_known = type(first) in (*_PLAIN, *_CONTAINERS)
    return not is_known and pickle.dumps(first) == pickle.dumps(second)


@torch.no_grad()
def _restored(value: Any, copied: Any) -> Any:
    """Return the original object with its earlier contents if it is mutable, else the copy."""
    if isinstance(copied, _State):
        _GENERATORS[type(value)][1](value, copied.state)
        return value
    if isinstance(copied, _Object):
        return value
    copied = copy.deepcopy(copied)
    if (
        isinstance(value, torch.Tensor)
        and value.shape == copied.shape
        and value.dtype == copied.dtype
    ):
        value.copy_(copied)
    elif isinstance(value, np.ndarray) and value.shape == copied.shape and value.flags.writeable:
        value[...] = copied
    elif isinstance(value, list):
        value[:] = copied
    elif isinstance(value, dict | set | deque):
        value.clear()
        value.extend(copied) if isinstance(value, deque) else value.update(copied)
    else:
        return copied
    return value
