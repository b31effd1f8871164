"""A look at a user's code before a run begins: what its syntax tree shows, and nothing of it is run.

What cannot be known from the tree alone (a class made by a function, names that a ``*`` import brings, bases from other packages)
is given the benefit of the doubt: the ranks will say it.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from everstep.code_rules import import_roots, module_path, modules
from everstep.errors import FieldError
from everstep.spec import CodeSpec

REQUIRED_METHODS = {"build_model": 0, "build_datasets": 0, "loss": 2}
"""Methods that a task must have, and how many arguments each is called with."""
OPTIONAL_METHODS = {
    "metrics": 2,
    "build_metrics": 0,
    "build_optimizer": 1,
    "collate": 1,
    "on_epoch_end": 3,
    "state_dict": 0,
    "load_state_dict": 1,
}

_MAX_SOURCE_BYTES = 256 << 10
"""A larger file is not parsed: nobody writes so much by hand, and other requests wait for the parser."""
_MAX_READ_BYTES = 8 << 20
"""Imports are followed until so much was parsed."""
_MAX_HOPS = 20
"""Longest chain of imports or base classes that is followed."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class _Found:
    """Where a name is defined. ``node`` is None where the tree does not show what it is."""

    path: str
    node: ast.ClassDef | Function | None


class _Tree:
    """The archive's modules, parsed when they are first asked for."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self._roots = import_roots(files.keys())
        self._parsed: dict[str, ast.Module | str] = {}

    def path_of(self, module: str) -> str | None:
        """The file that a module is; None where the archive has none."""
        return module_path(self.files.keys(), module, self._roots)

    def parse(self, path: str) -> ast.Module | str:
        """The module's tree, or what is wrong with it, with its line."""
        if path not in self._parsed:
            self._parsed[path] = _parse(path, self.files[path])
        return self._parsed[path]

    def imported(self, path: str, module: ast.Module) -> Iterator[str]:
        """Files of the archive that importing this module imports."""
        for node in ast.walk(module):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self.absolute(path, node)
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                parts = name.split(".")
                found = (self.path_of(".".join(parts[:depth])) for depth in range(1, len(parts) + 1))
                yield from (path for path in found if path is not None)

    def absolute(self, path: str, node: ast.ImportFrom) -> str:
        """The module that a ``from … import`` names, relative ones resolved."""
        if not node.level:
            return node.module or ""
        package = path.removesuffix(".py").split("/")[: -node.level]
        return ".".join([*package, *([node.module] if node.module else [])])

    def reachable(self, path: str) -> list[str]:
        """The module and all of the archive that importing it imports, in order."""
        order, seen, left_bytes = [path], {path}, _MAX_READ_BYTES
        for current in order:  # which grows meanwhile
            left_bytes -= len(self.files[current])
            module = self.parse(current)
            if isinstance(module, ast.Module) and left_bytes > 0:
                fresh = dict.fromkeys(found for found in self.imported(current, module) if found not in seen)
                order += fresh
                seen.update(fresh)
        return order

    def find(self, path: str, name: str, hops: int = _MAX_HOPS) -> _Found | None:
        """What ``name`` is at the top of a module, through imports within the archive. None: surely nothing."""
        module = self.parse(path)
        if isinstance(module, str) or not hops or len(self.files[path]) > _MAX_SOURCE_BYTES:
            return _Found(path, None)
        unknown = False
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*":
                        unknown = True
                    elif (alias.asname or alias.name) == name:
                        target = self.path_of(self.absolute(path, node))
                        return _Found(path, None) if target is None else self.find(target, alias.name, hops - 1)
        for statement in module.body:
            if isinstance(statement, ast.ClassDef | Function) and statement.name == name:
                return _Found(path, statement)
        return _Found(path, None) if unknown or name in _bound(module) or "__getattr__" in _bound(module) else None


def faults_of(code: CodeSpec, files: Mapping[str, bytes]) -> list[FieldError]:
    """Everything that is surely wrong with what ``code`` names, each with its file and line where it has one.

    Args:
        files: the archive's files by path.
    """
    field, entry = ("task", code.task) if code.task else ("train_fn", code.train_fn)
    assert entry is not None
    where = ("code", field)
    module_name, _, name = entry.partition(":")
    tree = _Tree(files)
    path = tree.path_of(module_name)
    if path is None:
        known = modules(files.keys())
        near = difflib.get_close_matches(module_name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its modules are {', '.join(known[:10])}{', …' if len(known) > 10 else ''}"
        return [FieldError(where, f"the archive has no module {module_name!r}; {hint}")]
    packages = [tree.path_of(module_name.rsplit(".", depth)[0]) for depth in range(1, module_name.count(".") + 1)]
    read = dict.fromkeys(file for start in (path, *packages) if start is not None for file in tree.reachable(start))
    broken = [problem for problem in map(tree.parse, read) if isinstance(problem, str)]
    if broken:
        return [FieldError(where, problem) for problem in broken]
    found = tree.find(path, name)
    if found is None:
        module = tree.parse(path)
        assert isinstance(module, ast.Module)
        near = difflib.get_close_matches(name, _bound(module), n=1)
        kind = "class" if field == "task" else "function"
        return [FieldError(where, f"{path} has no {kind} {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")]
    if found.node is None:
        return []
    if field == "train_fn":
        return _function_faults(found, where)
    return [*_class_faults(tree, found, where), *_argument_faults(found, code)]


def _function_faults(found: _Found, where: tuple[str, ...]) -> list[FieldError]:
    node = found.node
    assert node is not None
    place = _place(found.path, node)
    if isinstance(node, ast.ClassDef):
        return [FieldError(where, f"{place}: {node.name} is a class; a train_fn is a function of one argument")]
    if isinstance(node, ast.AsyncFunctionDef):
        return [FieldError(where, f"{place}: {node.name} is async; a train_fn is a plain function")]
    num_required = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
    if not node.decorator_list and (num_required > 1 or _needed_by_name(node)):
        return [FieldError(where, f"{place}: {node.name} is called with config, or with nothing; it needs other arguments")]
    return []


def _class_faults(tree: _Tree, found: _Found, where: tuple[str, ...]) -> list[FieldError]:
    """Methods that are missing, or cannot be called as they will be."""
    node = found.node
    assert node is not None
    if not isinstance(node, ast.ClassDef):
        return []  # a function that makes a task is one, too
    members = _members(tree, found)
    faults = []
    for name, num_arguments in (REQUIRED_METHODS | OPTIONAL_METHODS).items():
        if name in members.methods:
            path, method = members.methods[name]
            fault = _call_fault(method, num_arguments)
            if fault:
                faults.append(FieldError(where, f"{_place(path, method)}: {node.name}.{name} {fault}"))
        elif name in REQUIRED_METHODS and members.complete and name not in members.others:
            needed = ", ".join(REQUIRED_METHODS)
            told = f"{_place(found.path, node)}: class {node.name} has no method {name}; a task needs {needed}"
            faults.append(FieldError(where, told))
    return faults


@dataclass(frozen=True)
class _Members:
    """What a class has, with its bases."""

    methods: dict[str, tuple[str, Function]]
    others: frozenset[str]
    """Names that something else than a plain method is bound to."""
    complete: bool
    """Whether it surely has nothing more."""


def _members(tree: _Tree, found: _Found, hops: int = _MAX_HOPS) -> _Members:
    node = found.node
    if not isinstance(node, ast.ClassDef) or not hops:
        return _Members({}, frozenset(), False)
    methods: dict[str, tuple[str, Function]] = {}
    others: set[str] = set()
    complete = not node.decorator_list and not node.keywords
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in ("object", "Protocol", "ABC"):
            continue
        inherited = tree.find(found.path, base.id) if isinstance(base, ast.Name) else None
        theirs = _members(tree, inherited, hops - 1) if inherited is not None else _Members({}, frozenset(), False)
        methods = theirs.methods | methods
        others |= theirs.others
        complete = complete and theirs.complete
    for statement in node.body:
        if isinstance(statement, Function):
            methods[statement.name] = (found.path, statement)
        elif not isinstance(statement, ast.ClassDef):
            others |= _bound(ast.Module([statement], []))
    return _Members(methods, frozenset(others), complete)


def _call_fault(method: Function, num_arguments: int) -> str | None:
    """Why a method cannot be called with so many positional arguments; None where it can, or where a decorator may change that."""
    if isinstance(method, ast.AsyncFunctionDef):
        return "is async; a task's methods are plain functions"
    decorators = {node.id for node in method.decorator_list if isinstance(node, ast.Name)}
    if len(decorators) != len(method.decorator_list) or decorators - {"staticmethod", "classmethod"}:
        return None
    given = num_arguments + ("staticmethod" not in decorators)
    most = len(method.args.posonlyargs) + len(method.args.args)
    least = most - len(method.args.defaults)
    if least <= given and (given <= most or method.args.vararg) and not _needed_by_name(method):
        return None
    beside = "" if "staticmethod" in decorators else " beside self"
    return f"is called with {num_arguments} argument{'' if num_arguments == 1 else 's'}{beside}; it takes others"


def _needed_by_name(function: Function) -> bool:
    return any(default is None for default in function.args.kw_defaults)


def _argument_faults(found: _Found, code: CodeSpec) -> list[FieldError]:
    """``args`` against the class's own ``__init__``."""
    node = found.node
    if not isinstance(node, ast.ClassDef) or node.decorator_list:
        return []
    init = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if init is None or init.decorator_list:
        return []
    arguments = init.args
    named = [argument.arg for argument in [*arguments.args[not arguments.posonlyargs :], *arguments.kwonlyargs]]
    positional = named[: len(named) - len(arguments.kwonlyargs)]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [each.arg for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    place = _place(found.path, init)
    faults = []
    for name in code.args:
        if name not in named and arguments.kwarg is None:
            near = difflib.get_close_matches(name, named, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            faults.append(FieldError(("code", "args", name), f"{place}: {node.name} takes no argument {name!r}{hint}"))
    faults += [
        FieldError(("code", "args", name), f"{place}: {node.name} needs the argument {name!r}")
        for name in required
        if name not in code.args
    ]
    return faults


def _parse(path: str, source: bytes) -> ast.Module | str:
    if len(source) > _MAX_SOURCE_BYTES:
        return ast.Module([], [])
    try:
        return ast.parse(source, path)
    except SyntaxError as exc:
        return f"{path}, line {exc.lineno or 1}: {exc.msg}"
    except (ValueError, RecursionError, MemoryError) as exc:
        return f"{path}: cannot be read as Python: {exc or type(exc).__name__}"


def _place(path: str, node: ast.ClassDef | Function) -> str:
    return f"{path}, line {node.lineno}"


def _bound(module: ast.Module) -> set[str]:
    """Names that the module's statements bind anywhere."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | Function):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
    return names
