"""What a user's modules and objects hold beside what states hold and what is put back: globals,
attributes of classes and functions, closures, caches, generators.

A mapping of names to what shows a change. It is compared with that of an earlier moment; nothing
is restored.
"""

from __future__ import annotations

import functools
import itertools
import marshal
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from train_fn.step.place_watch import is_users
from train_fn.step.plain_attributes import followed, generator_text, internal

_MOST_OBJECTS = 20_000
_MOST_BYTES = 1 << 20
_ITERATORS = (itertools.count, itertools.cycle, itertools.repeat)
_OF_A_CLASS = frozenset(
    {
        "__abstractmethods__",
        "__dict__",
        "__doc__",
        "__module__",
        "__qualname__",
        "__slotnames__",
        "__weakref__",
        "_abc_impl",
    }
)
"""Entries of a class that Python makes, some of them when it is first used."""


class TooMuch(Exception):
    """There are more objects than can be compared."""


def held_values(owners: dict[str, object], trained: Iterable[object]) -> dict[str, object]:
    """Return what the user's modules, and objects by name, hold beside what is put back.

    Args:
        owners: objects whose plain attributes are put back, so that these are left out.
        trained: tensors that a state holds.

    Raises TooMuch.
    """
    walk = _Walk(trained)
    for name, owner in owners.items():
        walk.owner(name, owner, 0)
    for name, module in sorted(sys.modules.items()):
        if is_users(getattr(module, "__file__", None) or ""):
            walk.items(name, vars(module))
    return walk.found


class _Walk:
    """Follow every reference once."""

    def __init__(self, trained: Iterable[object]) -> None:
        self.found: dict[str, object] = {}
        self._seen: dict[int, object] = {id(each): each for each in trained}
        self._num_left = _MOST_OBJECTS

    def owner(self, path: str, owner: object, depth: int) -> None:
        """Follow what is not put back of an owner's attributes."""
        if id(owner) in self._seen:
            return
        self._note(owner)
        for key, value, is_put_back in followed(owner, depth):
            if not is_put_back:
                self.value(f"{path}.{key}", value)
            elif isinstance(getattr(value, "__dict__", None), dict) and depth == 0:
                self.owner(f"{path}.{key}", value, depth + 1)

    def items(self, path: str, values: dict[str, Any]) -> None:
        """Follow a namespace."""
        for key, value in list(values.items()):
            if not (isinstance(key, str) and key.startswith("__")):
                self.value(f"{path}.{key}", value)

    def value(self, path: str, value: Any) -> None:
        """Follow a value by its kind. What is of a library, and no container, is not followed."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self.found[path] = value if value == value else "nan"
            return
        if isinstance(value, types.ModuleType) or id(value) in self._seen:
            return
        self._note(value)
        if isinstance(value, torch.Tensor):
            self.found[path] = (id(value), value._version, tuple(value.shape))
        elif isinstance(value, np.ndarray):
            small = value.dtype != object and value.nbytes <= _MOST_BYTES
            self.found[path] = hash(value.tobytes()) if small else (id(value), value.shape)
        elif (text := generator_text(value)) is not None:
            self.found[path] = text
        elif isinstance(value, _ITERATORS):
            self.found[path] = repr(value)
        elif isinstance(value, types.GeneratorType):
            self.found[path] = value.gi_frame and value.gi_frame.f_lasti
        elif isinstance(value, dict | list | tuple | set | frozenset) or _is_deque(value):
            self._container(path, value)
        else:
            self._object(path, value)

    def _container(self, path: str, value: Any) -> None:
        try:
            self.found[path] = hash(marshal.dumps(value, 2))
        except ValueError:  # it holds more than plain values
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            self.found[path] = len(value)
            for key, part in list(pairs):
                self.value(f"{path}[{key!r:.40}]", part)

    def _object(self, path: str, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self.value(f"{path}.{name}", getattr(value, name))
        elif isinstance(value, functools._lru_cache_wrapper):
            self.found[path] = (id(value), value.cache_info().misses)
            self.value(path, value.__wrapped__)
        elif isinstance(value, type):
            self.found[path] = id(value)
            if is_users(_file_of(value)):
                for key, part in list(vars(value).items()):
                    if key not in _OF_A_CLASS:
                        self.value(f"{path}.{key}", part)
        elif isinstance(value, property | staticmethod | classmethod):
            inner = value.fget if isinstance(value, property) else value.__func__
            self.value(path, inner)
        elif isinstance(value, types.SimpleNamespace) or is_users(_file_of(type(value))):
            self._instance(path, value)

    def _function(self, path: str, function: types.FunctionType) -> None:
        self.found[path] = id(function.__code__)
        if is_users(function.__code__.co_filename):
            cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
            parts = {"": function.__defaults__, "*": function.__kwdefaults__, "closure": cells}
            for name, part in parts.items():
                if part:
                    self.value(f"{path}({name})", part)
            self.items(path, vars(function))

    def _instance(self, path: str, value: Any) -> None:
        own = internal(value)
        for key, part in _attributes(value):
            if key not in own:
                self.value(f"{path}.{key}", part)

    def _note(self, value: object) -> None:
        self._seen[id(value)] = value  # held, so that no other gets its number
        self._num_left -= 1
        if self._num_left < 0:
            raise TooMuch


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield name, getattr(value, name)


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _is_deque(value: object) -> bool:
    return type(value).__name__ == "deque"


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that was not set yet
        return False
