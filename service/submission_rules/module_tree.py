"""The modules of an uploaded archive as syntax trees, with their names and classes.

What a tree does not show counts as unknown. No code is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from everstep.code.rules import MAX_DEPTH, import_roots, module_path

_MAX_SOURCE_BYTES = 64 << 10
"""Larger files are not parsed. The parser blocks the interpreter, and so every request; this much
takes it a tenth of a second."""
_MAX_READ_BYTES = 512 << 10
"""Limit on the source that is parsed while imports are followed."""
_MAX_HOPS = 20
"""Limit on a chain of imports or base classes."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """Where a name is defined. ``node`` is None if the tree does not show what the name is."""

    path: str
    node: ast.ClassDef | Function | None


@dataclass(frozen=True)
class Members:
    """The members of a class and its bases."""

    methods: dict[str, tuple[str, Function]]
    others: frozenset[str]
    """Names that are bound to something else than a plain method."""
    complete: bool
    """Whether the class certainly has no further members."""


@dataclass(frozen=True)
class _Names:
    """A module's names, from one walk through its tree."""

    imported: Mapping[str, tuple[str, str]]
    """Name of a ``from … import`` -> its module and its name there."""
    defined: Mapping[str, ast.ClassDef | Function]
    """Classes and functions at the module's top level."""
    bound: frozenset[str]
    """Names that are bound anywhere."""
    open: bool
    """Whether it may have further names, by a ``*`` import or ``__getattr__``."""


class ModuleTree:
    """The archive's modules, parsed on first use."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self._roots = import_roots(files.keys())
        self._parsed: dict[str, ast.Module | str] = {}
        self._names: dict[str, _Names] = {}
        self._members: dict[Found, Members] = {}

    def path_of(self, module: str) -> str | None:
        """Return the file of a module, or None if the archive has none."""
        return module_path(self.files.keys(), module, self._roots)

    def parse(self, path: str) -> ast.Module | str:
        """Return the module's tree, or the syntax error with its line."""
        if path not in self._parsed:
            self._parsed[path] = _parse(path, self.files[path])
        return self._parsed[path]

    def imported(self, path: str, module: ast.Module) -> Iterator[str]:
        """Yield the files of the archive that this module imports."""
        for node in ast.walk(module):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self.absolute(path, node)
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                parts = name.split(".", MAX_DEPTH)[:MAX_DEPTH]
                found = (
                    self.path_of(".".join(parts[:depth])) for depth in range(1, len(parts) + 1)
                )
                yield from (path for path in found if path is not None)

    def absolute(self, path: str, node: ast.ImportFrom) -> str:
        """Return the module of a ``from … import``, with relative imports resolved."""
        if not node.level:
            return node.module or ""
        package = path.removesuffix(".py").split("/")[: -node.level]
        return ".".join([*package, *([node.module] if node.module else [])])

    def reachable(self, path: str) -> list[str]:
        """Return the module and the archive's modules that its import reads, in order.

        The list ends once _MAX_READ_BYTES are parsed.
        """
        order, seen, left_bytes = [path], {path}, _MAX_READ_BYTES
        for number, current in enumerate(order):  # The list grows while it is read.
            left_bytes -= len(self.files[current])
            if number and left_bytes < 0:
                return order[:number]
            module = self.parse(current)
            if isinstance(module, ast.Module):
                fresh = dict.fromkeys(
                    found for found in self.imported(current, module) if found not in seen
                )
                order += fresh
                seen.update(fresh)
        return order

    def find(self, path: str, name: str, hops: int = _MAX_HOPS) -> Found | None:
        """Return where ``name`` at the top of a module is defined, through imports of the archive.

        None means that it is certainly not defined.
        """
        module = self.parse(path)
        if isinstance(module, str) or not hops or len(self.files[path]) > _MAX_SOURCE_BYTES:
            return Found(path, None)
        names = self.names(path, module)
        if name in names.imported:
            source, original = names.imported[name]
            target = self.path_of(source)
            return Found(path, None) if target is None else self.find(target, original, hops - 1)
        if name in names.defined:
            return Found(path, names.defined[name])
        return Found(path, None) if names.open or name in names.bound else None

    def names(self, path: str, module: ast.Module) -> _Names:
        """Return the module's names. The result is cached, so that its tree is walked once."""
        if path not in self._names:
            imported: dict[str, tuple[str, str]] = {}
            star = False
            for node in ast.walk(module):
                if isinstance(node, ast.ImportFrom):
                    source = self.absolute(path, node)
                    star = star or any(alias.name == "*" for alias in node.names)
                    for alias in node.names:
                        imported.setdefault(alias.asname or alias.name, (source, alias.name))
            defined: dict[str, ast.ClassDef | Function] = {}
            for statement in module.body:
                if isinstance(statement, ast.ClassDef | Function):
                    defined.setdefault(statement.name, statement)
            bound = frozenset(_bound(module))
            self._names[path] = _Names(imported, defined, bound, star or "__getattr__" in bound)
        return self._names[path]

    def members(self, found: Found, hops: int = _MAX_HOPS) -> Members:
        """Return the members of a class. The result is cached: a base may be reached in many
        ways."""
        if found not in self._members:
            # For a class that is its own base.
            self._members[found] = Members({}, frozenset(), False)
            self._members[found] = _members(self, found, hops)
        return self._members[found]


def _members(tree: ModuleTree, found: Found, hops: int = _MAX_HOPS) -> Members:
    node = found.node
    if not isinstance(node, ast.ClassDef) or not hops:
        return Members({}, frozenset(), False)
    methods: dict[str, tuple[str, Function]] = {}
    others: set[str] = set()
    complete = not node.decorator_list and not node.keywords
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in ("object", "Protocol", "ABC"):
            continue
        inherited = tree.find(found.path, base.id) if isinstance(base, ast.Name) else None
        theirs = (
            tree.members(inherited, hops - 1)
            if inherited is not None
            else Members({}, frozenset(), False)
        )
        methods = theirs.methods | methods
        others |= theirs.others
        complete = complete and theirs.complete
    for statement in node.body:
        if isinstance(statement, Function):
            methods[statement.name] = (found.path, statement)
        elif not isinstance(statement, ast.ClassDef):
            others |= _bound(ast.Module([statement], []))
    return Members(methods, frozenset(others), complete)


def _parse(path: str, source: bytes) -> ast.Module | str:
    if len(source) > _MAX_SOURCE_BYTES:
        return ast.Module([], [])
    try:
        return ast.parse(source, path)
    except SyntaxError as exc:
        return f"{path}, line {exc.lineno or 1}: {exc.msg}"
    except (ValueError, RecursionError, MemoryError) as exc:
        return f"{path}: cannot be read as Python: {exc or type(exc).__name__}"


def _bound(module: ast.Module) -> set[str]:
    """Return the names that the module's statements bind anywhere."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | Function):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
    return names
