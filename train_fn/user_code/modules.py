"""Unpack users' code once per node, keep it for later attempts, and import it. Errors name the file
and line.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import threading
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from everstep.code import import_roots
from storage.code import CodeStore, read_members, unpack
from storage.filesystem import Storage
from train_fn.errors import BadTask
from train_fn.node.node_dir import cache_root, files_of, once_a_node
from train_fn.recovery.error_text import ended_program, user_place

_path_lock = threading.Lock()
"""Two threads that invalidate the import caches at once remove one entry twice: KeyError."""
_on_disk: dict[str, Path] = {}
"""Digests whose files are taken from where their owner has them."""
_IN_CACHE = re.compile(r"^.*/cache/code/[0-9a-f]{64}/")


def add_to_path(storage: Storage, digest: str) -> None:
    """Make an archive's modules importable in this process, before all others. Raises StorageError
    where it cannot be fetched."""
    if digest not in _on_disk:
        code = files_on_node(storage, digest)
        import_from(code.directory, code.names)


def work_on(archive: bytes, directory: Path) -> None:
    """Import an archive's modules from the directory that it was packed from, in this process:
    breakpoints there hold."""
    _on_disk[f"sha256:{hashlib.sha256(archive).hexdigest()}"] = directory.resolve()
    import_from(directory.resolve(), {member.path for member in read_members(archive)})


def import_from(directory: Path, files: Collection[str]) -> None:
    """Make the modules among ``files``, which lie in ``directory``, importable in this process."""
    roots = [str(directory / root) for root in import_roots(files)]
    with _path_lock:
        sys.path[:0] = [root for root in roots if root not in sys.path]
        importlib.invalidate_caches()


def load_named(entry: str) -> Any:
    """Import the module of ``module:name``, and return what has that name. Raises BadTask with file
    and line."""
    module_name, _, name = entry.partition(":")
    first = module_name.partition(".")[0]
    taken = sys.modules.get(first)
    if taken is not None and not _is_uploaded(taken):
        owner = getattr(taken, "__file__", None) or "another package"
        raise BadTask(f"the name {first!r} is taken on this node by {owner}; rename your module")
    declare_missing_ops()  # for torchvision, which the module may import
    # User code must not read the arguments of the rank's process.
    sys.argv = [_file_of(module_name)]
    try:
        module = importlib.import_module(module_name)
    except SystemExit as exc:
        raise ended_program(f"{module_name} cannot be imported", exc) from exc
    except Exception as exc:
        place = user_place("".join(traceback.format_exception(exc)))
        raise BadTask(
            f"{module_name} cannot be imported: {type(exc).__name__}: "
            f"{exc}{f' ({place})' if place else ''}"
        ) from exc
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadTask(
            f"{_short(getattr(module, '__file__', None) or module_name)} has no {name!r}{hint}"
        )
    return getattr(module, name)


def _file_of(module_name: str) -> str:
    """Return a module's file without importing it or its packages; its name if it is not found."""
    path = module_name.replace(".", "/")
    candidates = (
        Path(root, f"{path}{end}") for root in sys.path for end in (".py", "/__init__.py")
    )
    return str(next((candidate for candidate in candidates if candidate.is_file()), module_name))


def place_of(thing: Any) -> str:
    """Return `` (file, line N)`` of a class, function or method; "" if Python does not know."""
    with contextlib.suppress(TypeError, OSError):
        thing = inspect.unwrap(thing.func if isinstance(thing, functools.partial) else thing)
        code = getattr(thing, "__code__", None)
        line = code.co_firstlineno if code is not None else inspect.getsourcelines(thing)[1]
        return f" ({_short(inspect.getsourcefile(thing) or '')}, line {line})"
    return ""


def _is_uploaded(module: ModuleType) -> bool:
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    known = [place for place in places if place is not None]
    return any(
        _IN_CACHE.match(place)
        or any(Path(place).is_relative_to(mine) for mine in _on_disk.values())
        for place in known
    )


def _short(file: str) -> str:
    """Return a file's path as its owner knows it."""
    return _IN_CACHE.sub("", file)


@dataclass(frozen=True)
class CodeOnNode:
    """An archive's files in a directory of this node."""

    directory: Path
    names: Collection[str]


def files_on_node(storage: Storage, digest: str) -> CodeOnNode:
    """Return the archive's files on this node. The first process of the node that asks unpacks
    them."""
    directory = cache_root() / "code" / digest.partition(":")[2]
    once_a_node(directory, lambda temporary: unpack(CodeStore(storage).read(digest), temporary))
    return CodeOnNode(directory, files_of(directory).keys())


# ---------------------------------------------------------------- torchvision ops

# Make torchvision importable with a CPU build of torch.
#
# torchvision's wheel carries operators compiled for CUDA torch. If they do not load, importing
# torchvision fails, because it registers shape functions for operators that do not exist. Declaring
# their schemas first fixes that. The operators themselves (box suppression) serve detection, which
# nothing here uses.

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_kept_alive: list[Any] = []


def torchvision_models() -> ModuleType:
    """Return ``torchvision.models``. The first call imports it, which takes about a second."""
    declare_missing_ops()
    from torchvision import models

    return models  # type: ignore[no-any-return]


def torchvision_datasets() -> ModuleType:
    """Return ``torchvision.datasets``, imported by the first call."""
    declare_missing_ops()
    from torchvision import datasets

    return datasets  # type: ignore[no-any-return]


def declare_missing_ops() -> None:
    """Declare the operators that torchvision expects and its own library does not bring."""
    if _kept_alive or _library_loads():
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS.values():
        library.define(schema)  # type: ignore[no-untyped-call]
    _kept_alive.append(library)


def _library_loads() -> bool:
    """Return whether torchvision's compiled operators load into this torch."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return True
    libraries = list(Path(spec.submodule_search_locations[0]).glob("_C*.so"))
    try:
        for library in libraries:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return bool(libraries)


# ---------------------------------------------------------------- source

# What the Python files of an archive say, without running them.

DOOR = "everstep.train"
"""Module that code with a protected loop imports."""


def imports(root: Path, names: Collection[str], module: str) -> bool:
    """Return whether a Python file of an archive imports ``module``, anywhere in it.

    Args:
        root: directory with the archive's files.
        names: their paths in it.
    """
    first = module.partition(".")[0].encode()
    for name in names:
        file = root / name
        if name.endswith(".py") and file.is_file() and first in (source := file.read_bytes()):
            try:
                found = any(_names(node, module) for node in ast.walk(ast.parse(source)))
            except (SyntaxError, ValueError, RecursionError):
                found = module.encode() in source
            if found:
                return True
    return False


def mentions(root: Path, names: Collection[str], word: bytes) -> bool:
    """Return whether a Python file of an archive has ``word`` in it, in any case of letters."""
    files = (root / name for name in names if name.endswith(".py"))
    return any(word in file.read_bytes().lower() for file in files if file.is_file())


def _names(node: ast.AST, module: str) -> bool:
    """Return whether a statement imports ``module`` or a part of it, or a string names it."""
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
        found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = [node.value]  # importlib.import_module
    else:
        return False
    return any(name == module or name.startswith(f"{module}.") for name in found)
