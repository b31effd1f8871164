"""What a user's modules and objects hold beside what states hold and what is put back: globals,
attributes of classes and functions, closures, caches, generators, hooks, other models.

A mapping of names to what shows a change. It is compared with that of an earlier moment; nothing
is restored.
"""

from __future__ import annotations

import argparse
import array
import bz2
import collections
import concurrent.futures
import contextvars
import ctypes
import functools
import gc
import io
import itertools
import logging
import lzma
import marshal
import mmap
import multiprocessing.connection
import pickle
import queue
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.sharedctypes import SynchronizedBase
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._config_module import ConfigModule
from torch.utils.data import DataLoader

from train_fn.step.place_watch import is_users
from train_fn.step.plain_attributes import followed, generator_text, internal, is_built_in, slots_of

logger = logging.getLogger(__name__)

_MOST_OBJECTS = 20_000
_MOST_BYTES = 64 << 20
"""Bytes of arrays and tensors that are read in all. Of what is beyond, some words are."""
_FEW_BYTES, _NUM_WORDS = 1 << 20, 4096
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_BUFFERS = (
    *(bytearray, memoryview, mmap.mmap, array.array),
    *(ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union),
)
_NUMBERS = (torch.Tensor, np.ndarray, np.generic, *_BUFFERS)
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_HOLD_OTHERS = frozenset({dict, list, tuple, set, frozenset})
_MARSHALLED = frozenset({*_PLAIN, *_HOLD_OTHERS, bytearray, array.array, np.ndarray})
_MOST_LEVELS = 20
_PAUSED = {
    types.GeneratorType: ("gi_frame", "gi_yieldfrom"),
    types.CoroutineType: ("cr_frame", "cr_await"),
    types.AsyncGeneratorType: ("ag_frame", "ag_await"),
}
_HOLDERS = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
    threading.local,
    threading.Event,
    threading.Semaphore,
    threading.Condition,
    threading.Barrier,
    concurrent.futures.Future,
    SharedMemory,
    SynchronizedBase,
    queue.Queue,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
)
"""Python's own classes whose objects hold what a user puts there."""
_UNTOLD = (
    *(type(zlib.compressobj()), type(zlib.decompressobj())),
    *(bz2.BZ2Compressor, bz2.BZ2Decompressor, lzma.LZMACompressor, lzma.LZMADecompressor),
    multiprocessing.connection.Connection,
)
"""Python's own classes whose objects hold what nothing shows."""
_TOLD_BY: dict[str, Callable[[Any], object]] = {
    "numpy.random.bit_generator.SeedSequence": attrgetter("state"),
    "numpy.random.bit_generator.BitGenerator": attrgetter("state"),
    "sqlite3.Connection": attrgetter("total_changes"),
    "_hashlib.HASH": methodcaller("digest"),
    "_queue.SimpleQueue": methodcaller("qsize"),
    "_thread.lock": methodcaller("locked"),
    "builtins.BaseException": attrgetter("args"),
    "builtins.mappingproxy": dict,
    **{f"builtins.dict_{each}": list for each in ("keys", "values", "items")},
    "numpy.random._generator.Generator": attrgetter("bit_generator.state"),
    "numpy.random.mtrand.RandomState": methodcaller("get_state"),
    "torch._C.Generator": methodcaller("get_state"),
    "_random.Random": methodcaller("getstate"),
}
"""Classes of libraries, and what shows that an object has changed."""
_OF_A_CLASS = frozenset(
    {
        *("__abstractmethods__", "__dict__", "__doc__", "__module__", "__qualname__"),
        *("__slotnames__", "__weakref__", "_abc_impl"),
    }
)
"""Entries of a class that Python makes, some of them when it is first used."""
_PLACES_OF_HOOKS = ("torch.nn.modules.module", "torch.optim.optimizer")
"""Modules with hooks for all modules, or all optimizers."""


_NOT_PICKLED = ("everstep", "ray.", "service.", "storage.", "torch._", "train_fn.")
"""Beginnings of modules whose objects are not pickled: they hold no state of the user's."""
_MADE_BY_LIBRARIES = frozenset({"cython_runtime"})
"""Modules without a file that extensions make, and change when an error passes through them."""


class TooMuch(Exception):
    """There are more objects than can be compared."""


def held_values(owners: dict[str, object], trained: Iterable[object]) -> dict[str, object]:
    """Return what the user's modules, and objects by name, hold beside what is put back.

    Args:
        owners: objects whose plain attributes are put back, so that these are left out.
        trained: tensors that a state holds.

    Raises TooMuch.
    """
    held = list(trained)
    walk = _Walk(held)
    for number, each in enumerate(held):
        if isinstance(each, torch.Tensor):
            names = ("_backward_hooks", "_post_accumulate_grad_hooks")
            walk.hooks(f"tensor {number}", {name: getattr(each, name, None) for name in names})
            walk.items(f"tensor {number}", vars(each))
    for name in _PLACES_OF_HOOKS:
        walk.hooks(name, vars(sys.modules[name]))
    for name, owner in owners.items():
        walk.note(name, owner)
    for name, owner in owners.items():
        walk.owner(name, owner, 0)
    for name, module in sorted(filter(_is_followed, list(sys.modules.items()))):
        if isinstance(module, types.ModuleType):
            walk.items(name, vars(module))
        else:
            walk.value(name, module)
    of_torch = _settings_of_torch()
    for variable, value in own_context().items():
        if id(variable) not in of_torch and variable.name != "_vt_active_calls":
            walk.value(f"context variable {variable.name}", value)
    return walk.found


def own_context() -> dict[contextvars.ContextVar[Any], object]:
    """Return this thread's context variables but torch's caches and patches of its settings."""
    here = contextvars.copy_context()
    return {each: here[each] for each in here if not each.name.startswith("torch.")}


def _settings_of_torch() -> set[int]:
    """Return the ids of the context variables that hold torch's settings. Its compiler sets some of
    them again whenever it compiles, and every attempt begins with those of the build."""
    modules = [each for each in list(sys.modules.values()) if isinstance(each, ConfigModule)]
    return {id(entry.user_override) for each in modules for entry in each._config.values()}


class _Itself:
    """An object that is compared by identity. It is not kept alive: no other can be it."""

    def __init__(self, value: Any) -> None:
        self._value = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        value = self._value()
        return value is not None and isinstance(other, _Itself) and value is other._value()

    __hash__ = None  # type: ignore[assignment]


class _Found(dict[str, object]):
    """What was found, by names that may be cut short: none takes the place of another."""

    def __init__(self) -> None:
        self._times: collections.Counter[str] = collections.Counter()

    def __setitem__(self, name: str, value: object) -> None:
        self._times[name] += 1
        is_first = self._times[name] == 1
        super().__setitem__(name if is_first else f"{name} ({self._times[name]})", value)


class _Walk:
    """Follow every reference once."""

    def __init__(self, trained: Iterable[object]) -> None:
        self.found = _Found()
        self._seen: dict[int, tuple[object, str]] = {id(each): (each, "state") for each in trained}
        self._num_left, self._bytes_left = _MOST_OBJECTS, _MOST_BYTES
        every = list(sys.modules.values())
        self._of_modules = {id(vars(each)) for each in every if isinstance(each, types.ModuleType)}

    def owner(self, path: str, owner: object, depth: int) -> None:
        """Follow what is not put back of an owner's attributes."""
        if isinstance(owner, nn.Module):
            self.found[f"{path}.modules"] = [
                (name, None if each is None else _Itself(each))
                for name, each in owner._modules.items()
            ]
        if isinstance(owner, nn.Module | torch.optim.Optimizer):
            self.hooks(path, vars(owner))
        for key, value, is_put_back in followed(owner, depth):
            if not is_put_back:
                self.value(f"{path}.{key}", value)
            elif depth == 0 and hasattr(value, "__dict__") and id(value) not in self._seen:
                self.note(f"{path}.{key}", value)
                self.owner(f"{path}.{key}", value, depth + 1)

    def hooks(self, path: str, places: Mapping[str, Any]) -> None:
        """Follow the hooks of the user's among all that somebody has registered."""
        for key, hooks in places.items():
            if key.endswith("_hooks") and isinstance(hooks, dict):
                own = [each for each in hooks.values() if is_users(_file_behind(each))]
                if own:
                    self.found[f"{path}.{key}"] = len(own)
                for number, hook in enumerate(own):
                    self.value(f"{path}.{key}[{number}]", hook)

    def items(self, path: str, values: dict[str, Any]) -> None:
        """Follow a namespace."""
        for key, value in list(values.items()):
            if not (isinstance(key, str) and key.startswith("__") and key.endswith("__")):
                self.value(f"{path}.{key}", value)

    def value(self, path: str, value: Any) -> None:
        """Follow a value. If it raises when it is looked at, as a proxy may before its object is
        there, nothing is equal to it."""
        try:
            self._follow(path, value)
        except TooMuch:
            raise
        except Exception as exc:  # of any code behind an attribute
            kind = type(exc).__name__
            logger.info("%s counts as changed, since looking at it raises %s", path, kind)
            self.found[path] = object()

    def _follow(self, path: str, value: Any) -> None:
        """Follow a value by its kind. What is of a library, and no container, is not followed."""
        if isinstance(value, _PLAIN):
            # -0.0 equals 0.0, and 1 equals 1.0
            self.found[path] = repr(value) if isinstance(value, float | complex) else value
            if type(value) in _PLAIN or not is_users(file_of(type(value))):
                return
        if id(value) in self._seen:
            self.found[path] = f"as {self._seen[id(value)][1]}"
            return
        self.note(path, value)
        if isinstance(value, _NUMBERS):
            self._numbers(path, value)
        elif (text := generator_text(value)) is not None:
            self.found[path] = text
        elif type(value) in _PAUSED:
            frame, waits_for = (getattr(value, name) for name in _PAUSED[type(value)])
            self.found[path] = frame and frame.f_lasti
            self.items(f"{path}()", {} if frame is None else dict(frame.f_locals))
            self.value(f"{path}()", waits_for)
        elif _is_of_thread(value):
            self.found[path] = object()  # the thread of the next attempt finds it empty
        elif isinstance(value, _CONTAINERS):
            self._container(path, value)
        elif isinstance(value, type | types.ModuleType):
            self._namespace(path, value)
        elif isinstance(value, (*_HOLDERS, *_PLAIN, nn.Module)):
            self._instance(path, value)
        else:
            is_own = is_users(file_of(type(value)))
            if is_own:
                self._instance(path, value)
            if not is_own or is_built_in(type(value)):
                self._built_in(path, value)

    def _built_in(self, path: str, value: Any) -> None:
        """Follow what an object holds that is no attribute."""
        if isinstance(value, io.IOBase):
            self.found[path] = _read_up_to(value)
        elif isinstance(value, _UNTOLD):
            self.found[path] = object()
        elif isinstance(value, Iterator):
            self.found[path] = _left_of(value)
        else:
            self._function(path, value)

    def _numbers(self, path: str, value: Any) -> None:
        self.items(path, dict(_own(value)))
        if isinstance(value, torch.Tensor):
            if is_lazy(value):
                return
            version = None if value.is_inference() else value._version
            self.found[path] = (_Itself(value), version, tuple(value.shape))
            value = _array_of(value)
        elif isinstance(value, mmap.mmap) and len(value) > _FEW_BYTES:
            return
        elif isinstance(value, _BUFFERS):
            value = np.frombuffer(bytes(memoryview(value)), np.uint8)
        if value is None or _is_of_a_file(value):
            return
        values = np.asarray(value)
        if values.dtype.hasobject:
            self._container(path, values.ravel().tolist())
        else:
            self.found[f"{path} contents"] = (values.dtype.str, values.shape, self._digest(values))

    def _digest(self, values: Any) -> object:
        """Return what shows a change of an array. Of a large one, permutations may be missed."""
        if not values.nbytes or (not values.flags.forc and values.nbytes > self._bytes_left):
            return None
        octets = values.ravel(order="K").view(np.uint8)
        if octets.size <= _FEW_BYTES:
            return zlib.crc32(octets)
        words = octets[: octets.size // 8 * 8].view(np.uint64)
        some = zlib.crc32(words[:: len(words) // _NUM_WORDS].copy())
        if octets.size > self._bytes_left:
            return some
        self._bytes_left -= octets.size
        return some, int(words.sum()), bytes(octets[words.nbytes :])

    def _container(self, path: str, value: Any) -> None:
        parts = dict(value) if isinstance(value, dict) else list(value)
        if (contents := _hash_of_plain(parts)) is not None:
            self.found[path] = contents
        else:
            self.found[path] = len(value)
            pairs = parts.items() if isinstance(parts, dict) else enumerate(parts)
            for number, (key, part) in enumerate(pairs):
                if isinstance(key, weakref.ref) or is_users(file_of(type(key))):
                    self.value(f"{path} key {number}", key)
                self.value(f"{path}[{key!r:.40}]", part)
        for key, part in _attributes(value):
            self.value(f"{path}.{key}", part)

    def _namespace(self, path: str, value: Any) -> None:
        if isinstance(value, types.ModuleType):
            if _is_made(value):
                self.items(path, vars(value))
            return
        self.found[path] = _Itself(value)
        if is_users(file_of(value)):
            for key, part in list(vars(value).items()):
                if key not in _OF_A_CLASS:
                    self.value(f"{path}.{key}", part)

    def _function(self, path: str, value: Any) -> None:
        """Follow a function of any kind, or an object of a library."""
        if isinstance(value, types.FunctionType):
            self._code(path, value)
        elif isinstance(value, types.MethodType):
            self.value(f"{path}.__func__", value.__func__)
            self.value(f"{path}.__self__", value.__self__)
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            self.found[path] = value.__name__
            self.value(f"{path}.__self__", value.__self__)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self.value(f"{path}.{name}", getattr(value, name))
        elif isinstance(value, functools._lru_cache_wrapper):
            self.found[path] = (_Itself(value), value.cache_info().misses)
            self.value(f"{path}.__wrapped__", value.__wrapped__)
            self._cached(path, value)
        elif isinstance(value, property | staticmethod | classmethod):
            inner = value.fget if isinstance(value, property) else value.__func__
            self.value(path, inner)
        elif isinstance(value, weakref.ref):
            self.value(f"{path}()", value())
        elif isinstance(value, logging.Filterer):
            self.value(f"{path}.filters", value.filters)
            self.value(f"{path}.handlers", getattr(value, "handlers", None))
        elif isinstance(value, torch.autograd.graph.Node):
            self.found[path] = object()  # it does not tell its hooks
        elif hasattr(type(value), "state_dict") and not isinstance(value, DataLoader):
            self._state(path, value)
        else:
            self._of_a_library(path, value)

    def _cached(self, path: str, cache: Any) -> None:
        """Follow the objects that a cache holds. It tells them to the garbage collector only."""
        for each in gc.get_referents(cache):
            if not isinstance(each, (*_PLAIN, type, functools.partial)) and (
                each is not cache.__dict__ and each is not cache.__wrapped__
            ):
                self.value(f"{path}[{id(each)}]", each)

    def _of_a_library(self, path: str, value: Any) -> None:
        """Note what shows a change of an object whose class is no user's: its public numbers, and
        what it would be pickled by."""
        for kind in type(value).__mro__:
            told = _TOLD_BY.get(f"{kind.__module__}.{kind.__qualname__}")
            if told is not None:
                self.value(f"{path} state", told(value))
                return
        for key, part in _own(value):
            if not key.startswith("_") and isinstance(part, (*_PLAIN, *_NUMBERS)):
                self.value(f"{path}.{key}", part)
        if not type(value).__module__.startswith(_NOT_PICKLED):
            self._pickled(path, value)

    def _pickled(self, path: str, value: Any) -> None:
        """Note what a library's object would be pickled by, and follow the user's parts in it."""
        stream = _Digest()
        parts: list[object] = []
        buffers: list[pickle.PickleBuffer] = []
        pickler = _Pickler(stream, value, parts, buffers)
        try:
            pickler.dump(value)
        except _Enough:
            pass
        except Exception:  # it cannot be pickled; its public numbers were noted
            return
        self.found[f"{path} pickle"] = stream.sum
        for number, part in enumerate(parts):
            self.value(f"{path}<{number}>", part)
        for number, buffer in enumerate(buffers):
            octets = np.frombuffer(buffer.raw(), np.uint8)
            self.found[f"{path} buffer {number}"] = self._digest(octets)

    def _state(self, path: str, value: Any) -> None:
        try:
            state = value.state_dict()
        except Exception:  # a library's own reasons
            self.found[path] = object()
        else:
            self._container(path, state)

    def _code(self, path: str, function: types.FunctionType) -> None:
        self.found[path] = _Itself(function.__code__)
        if is_users(function.__code__.co_filename):
            cells = [cell.cell_contents for cell in function.__closure__ or () if is_full(cell)]
            parts = {"": function.__defaults__, "*": function.__kwdefaults__, "closure": cells}
            for name, part in parts.items():
                if part:
                    self.value(f"{path}({name})", part)
            if id(function.__globals__) not in self._of_modules:
                self.value(f"{path}()", function.__globals__)
        self.items(path, vars(function))
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            self.value(f"{path}.__wrapped__", wrapped)

    def _instance(self, path: str, value: Any) -> None:
        own = internal(value)
        if isinstance(value, nn.Module):
            self.found[f"{path}.training"] = value.training
            for parts in (value._parameters, value._buffers, value._modules):
                self.items(path, dict(parts))
        if isinstance(value, nn.Module | torch.optim.Optimizer):
            self.hooks(path, vars(value))
        if isinstance(value, torch.optim.Optimizer):
            self._state(path, value)
        for key, part in _attributes(value):
            if key not in own:
                self.value(f"{path}.{key}", part)

    def note(self, path: str, value: object) -> None:
        """Follow this object nowhere else. Raises TooMuch."""
        self._seen[id(value)] = value, path  # held, so that no other gets its number
        self._num_left -= 1
        if self._num_left < 0:
            raise TooMuch


class _Enough(Exception):
    """A pickle is longer than is compared."""


class _Digest:
    """A file that keeps a checksum of its first bytes."""

    def __init__(self) -> None:
        self.sum, self._num_left = 0, _FEW_BYTES

    def write(self, data: Any) -> int:
        octets = memoryview(data)[: self._num_left]
        self.sum = zlib.crc32(octets, self.sum)
        self._num_left -= len(octets)
        if not self._num_left:
            raise _Enough
        return len(octets)


class _Pickler(pickle.Pickler):
    """Pickle an object of a library, but for the parts that are followed one by one."""

    def __init__(
        self, file: Any, root: object, parts: list[object], buffers: list[pickle.PickleBuffer]
    ) -> None:
        super().__init__(file, 5, buffer_callback=buffers.append)
        self._root, self._parts, self._num_left = root, parts, _MOST_OBJECTS

    def persistent_id(self, value: object) -> int | None:
        self._num_left -= 1
        if not self._num_left:
            raise _Enough
        is_plain = isinstance(value, _PLAIN)
        is_part = isinstance(value, (*_NUMBERS, nn.Module, type, types.FunctionType))
        if (
            is_plain
            or value is self._root
            or not (is_part or generator_text(value) is not None or is_users(file_of(type(value))))
        ):
            return None
        self._parts.append(value)
        return len(self._parts)


def _own(value: object) -> list[tuple[str, Any]]:
    """Return what an object has of its own, without a call of its code."""
    try:
        return list(object.__getattribute__(value, "__dict__").items())
    except AttributeError:
        return []


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    yield from _own(value)
    for name in slots_of(type(value)):
        if hasattr(value, name):
            yield name, getattr(value, name)


def _hash_of_plain(value: Any) -> int | None:
    """Return a hash of a container of plain values, containers of these and arrays; None if it
    holds anything else."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        kinds = set(map(type, level))
        arrays = (each for each in level if isinstance(each, np.ndarray))
        if not kinds <= _MARSHALLED or any(each.dtype.hasobject for each in arrays):
            return None
        inner = [each for each in level if type(each) in _HOLD_OTHERS]
        keys = (each.keys() for each in inner if type(each) is dict)
        parts = (each.values() if type(each) is dict else each for each in inner)
        level = list(itertools.chain(*keys, *parts))
    try:
        return None if level else hash(marshal.dumps(value, 2))
    except ValueError:  # marshal reads no arrays of dates, nor any that is not contiguous
        return None


def _left_of(iterator: Any) -> object:
    """Return what shows how far an iterator of a library is. If nothing does, nothing is equal."""
    if isinstance(iterator, itertools.count | itertools.repeat):
        return repr(iterator)
    hint = getattr(type(iterator), "__length_hint__", None)
    return object() if hint is None else hint(iterator)


def _is_of_thread(value: object) -> bool:
    """Return whether this thread has put something there that no other thread finds."""
    if isinstance(value, contextvars.ContextVar):
        return value in contextvars.copy_context()
    return isinstance(value, threading.local) and bool(vars(value))


def _read_up_to(file: Any) -> object:
    """Return how far a file was read; None if it cannot be read. If nobody can say, nothing is
    equal."""
    if file.closed or not file.readable():
        return None
    try:
        return file.tell()
    except (OSError, ValueError):
        return object()


def _array_of(tensor: torch.Tensor) -> Any | None:
    """Return the contents of a tensor; None where they cannot be read at once."""
    plain = tensor.detach()
    is_plain = type(plain) is torch.Tensor and plain.layout is torch.strided
    if not is_plain or plain.device.type != "cpu" or plain.is_quantized:
        return None
    if plain.is_contiguous() and not (plain.is_conj() or plain.is_neg()):
        return plain.reshape(-1).view(torch.uint8).numpy()
    return torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage()).numpy()


def _is_of_a_file(values: Any) -> bool:
    """Return whether an array is a part of a file in memory."""
    while isinstance(values, np.ndarray):
        if getattr(values, "mode", None) == "c":
            return False  # writes to it stay in this process
        values = values.base
    return isinstance(values, mmap.mmap)


def _file_behind(function: Any) -> str:
    """Return the file of the code that a hook calls."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return file_of(type(function)) if code is None else code.co_filename


def file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _is_followed(named: tuple[str, Any]) -> bool:
    """Return whether a module is the user's, or was made by code."""
    name, module = named
    if not isinstance(module, types.ModuleType):
        return True
    if file := getattr(module, "__file__", None):
        return is_users(file)
    is_hidden = name.startswith("_") or name in _MADE_BY_LIBRARIES
    return not is_hidden and _is_made(module)


def _is_made(module: types.ModuleType) -> bool:
    """Return whether code has made a module, that comes from no file."""
    kind = type(module)
    return (
        (kind is types.ModuleType or is_users(file_of(kind)))
        and module.__spec__ is None
        and getattr(module, "__file__", None) is None
        and module.__name__ != "__main__"
    )


def is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that was not set yet
        return False
