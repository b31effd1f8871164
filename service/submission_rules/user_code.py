"""A look at a user's code before a run begins: what its syntax tree shows, and nothing of it is
run.

What cannot be known from the tree alone (a class made by a function, names that a ``*`` import
brings, bases from other packages) is given the benefit of the doubt: the ranks will say it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from everstep.code.rules import MAX_DEPTH, import_roots, module_path, modules
from everstep.errors import FieldError
from everstep.spec.field_errors import few
from everstep.spec.run_spec import CodeSpec
from everstep.text.close_names import closest

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

_MAX_SOURCE_BYTES = 64 << 10
"""A larger file is not parsed: the parser holds the interpreter, and so every request, for a tenth
of a second for so much."""
_MAX_READ_BYTES = 512 << 10
"""Imports are followed until so much was parsed."""
_MAX_SUGGESTIONS = 10
_MAX_HOPS = 20
"""Longest chain of imports or base classes that is followed."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class _Found:
    """Where a name is defined. ``node`` is None where the tree does not show what it is."""

    path: str
    node: ast.ClassDef | Function | None


@dataclass(frozen=True)
class _Names:
    """What a module's names are, from one walk through its tree."""

    imported: Mapping[str, tuple[str, str]]
    """Module and name there, for each name that a ``from … import`` brings."""
    defined: Mapping[str, ast.ClassDef | Function]
    """Classes and functions at its top."""
    bound: frozenset[str]
    """Names that are bound anywhere."""
    open: bool
    """Whether it may have others: by a ``*`` import or ``__getattr__``."""


class _Tree:
    """The archive's modules, parsed when they are first asked for."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self._roots = import_roots(files.keys())
        self._parsed: dict[str, ast.Module | str] = {}
        self._names: dict[str, _Names] = {}
        self._members: dict[_Found, _Members] = {}

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
                parts = name.split(".", MAX_DEPTH)[:MAX_DEPTH]
                found = (
                    self.path_of(".".join(parts[:depth])) for depth in range(1, len(parts) + 1)
                )
                yield from (path for path in found if path is not None)

    def absolute(self, path: str, node: ast.ImportFrom) -> str:
        """The module that a ``from … import`` names, relative ones resolved."""
        if not node.level:
            return node.module or ""
        package = path.removesuffix(".py").split("/")[: -node.level]
        return ".".join([*package, *([node.module] if node.module else [])])

    def reachable(self, path: str) -> list[str]:
        """Return the module and what of the archive importing it imports, in order, until
        _MAX_READ_BYTES were parsed."""
        order, seen, left_bytes = [path], {path}, _MAX_READ_BYTES
        for number, current in enumerate(order):  # which grows meanwhile
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

    def find(self, path: str, name: str, hops: int = _MAX_HOPS) -> _Found | None:
        """What ``name`` is at the top of a module, through imports within the archive. None: surely
        nothing."""
        module = self.parse(path)
        if isinstance(module, str) or not hops or len(self.files[path]) > _MAX_SOURCE_BYTES:
            return _Found(path, None)
        names = self.names(path, module)
        if name in names.imported:
            source, original = names.imported[name]
            target = self.path_of(source)
            return _Found(path, None) if target is None else self.find(target, original, hops - 1)
        if name in names.defined:
            return _Found(path, names.defined[name])
        return _Found(path, None) if names.open or name in names.bound else None

    def names(self, path: str, module: ast.Module) -> _Names:
        """Return the module's names. Its tree is walked once, however often it is asked for one."""
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

    def members(self, found: _Found, hops: int = _MAX_HOPS) -> _Members:
        """Return what a class has. Each class is asked once: else bases of bases would be asked
        again for every way to them."""
        if found not in self._members:
            # of a class that is its own base
            self._members[found] = _Members({}, frozenset(), False)
            self._members[found] = _members(self, found, hops)
        return self._members[found]


def faults_of(code: CodeSpec, files: Mapping[str, bytes]) -> list[FieldError]:
    """Everything that is surely wrong with what ``code`` names, each with its file and line where
    it has one.

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
        near = closest(module_name, known)
        hint = (
            f"did you mean {near}?"
            if near
            else f"its modules are {', '.join(known[:10])}{', …' if len(known) > 10 else ''}"
        )
        return [FieldError(where, f"the archive has no module {module_name!r}; {hint}")]
    packages = [
        tree.path_of(module_name.rsplit(".", depth)[0])
        for depth in range(1, module_name.count(".") + 1)
    ]
    read = dict.fromkeys(
        file for start in (path, *packages) if start is not None for file in tree.reachable(start)
    )
    broken = [problem for problem in map(tree.parse, read) if isinstance(problem, str)]
    if broken:
        return [FieldError(where, problem) for problem in broken]
    found = tree.find(path, name)
    if found is None:
        module = tree.parse(path)
        assert isinstance(module, ast.Module)
        near = closest(name, sorted(tree.names(path, module).bound))
        kind = "class" if field == "task" else "function"
        return [
            FieldError(
                where, f"{path} has no {kind} {name!r}{f'; did you mean {near!r}?' if near else ''}"
            )
        ]
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
        return [
            FieldError(
                where, f"{place}: {node.name} is a class; a train_fn is a function of one argument"
            )
        ]
    if isinstance(node, ast.AsyncFunctionDef):
        return [FieldError(where, f"{place}: {node.name} is async; a train_fn is a plain function")]
    num_required = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
    if not node.decorator_list and (num_required > 1 or _needed_by_name(node)):
        return [
            FieldError(
                where,
                (
                    f"{place}: {node.name} is called with config, or with nothing; it needs other "
                    "arguments"
                ),
            )
        ]
    return []


def _class_faults(tree: _Tree, found: _Found, where: tuple[str, ...]) -> list[FieldError]:
    """Methods that are missing, or cannot be called as they will be."""
    node = found.node
    assert node is not None
    if not isinstance(node, ast.ClassDef):
        return []  # a function that makes a task is one, too
    members = tree.members(found)
    faults = []
    for name, num_arguments in (REQUIRED_METHODS | OPTIONAL_METHODS).items():
        if name in members.methods:
            path, method = members.methods[name]
            fault = _call_fault(method, num_arguments)
            if fault:
                faults.append(
                    FieldError(where, f"{_place(path, method)}: {node.name}.{name} {fault}")
                )
        elif name in REQUIRED_METHODS and members.complete and name not in members.others:
            needed = ", ".join(REQUIRED_METHODS)
            told = (
                f"{_place(found.path, node)}: class {node.name} has no method {name}; a task "
                f"needs {needed}"
            )
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
        theirs = (
            tree.members(inherited, hops - 1)
            if inherited is not None
            else _Members({}, frozenset(), False)
        )
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
    """Why a method cannot be called with so many positional arguments; None where it can, or where
    a decorator may change that."""
    if isinstance(method, ast.AsyncFunctionDef):
        return "is async; a task's methods are plain functions"
    decorators = {node.id for node in method.decorator_list if isinstance(node, ast.Name)}
    if len(decorators) != len(method.decorator_list) or decorators - {
        "staticmethod",
        "classmethod",
    }:
        return None
    given = num_arguments + ("staticmethod" not in decorators)
    most = len(method.args.posonlyargs) + len(method.args.args)
    least = most - len(method.args.defaults)
    if least <= given and (given <= most or method.args.vararg) and not _needed_by_name(method):
        return None
    beside = "" if "staticmethod" in decorators else " beside self"
    return (
        f"is called with {num_arguments} argument{'' if num_arguments == 1 else 's'}{beside}; it "
        "takes others"
    )


def _needed_by_name(function: Function) -> bool:
    return any(default is None for default in function.args.kw_defaults)


def _argument_faults(found: _Found, code: CodeSpec) -> list[FieldError]:
    """``args`` against the class's own ``__init__``."""
    node = found.node
    if not isinstance(node, ast.ClassDef) or node.decorator_list:
        return []
    init = next(
        (
            item
            for item in node.body
            if isinstance(item, ast.FunctionDef) and item.name == "__init__"
        ),
        None,
    )
    if init is None or init.decorator_list:
        return []
    arguments = init.args
    named = [
        argument.arg
        for argument in [*arguments.args[not arguments.posonlyargs :], *arguments.kwonlyargs]
    ]
    positional = named[: len(named) - len(arguments.kwonlyargs)]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [
        each.arg
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    place = _place(found.path, init)
    faults: list[FieldError] = []
    known = set(named)
    for name in code.args:
        if name not in known and arguments.kwarg is None:
            near = closest(name, named) if len(faults) < _MAX_SUGGESTIONS else None
            hint = f"; did you mean {near!r}?" if near else ""
            faults.append(
                FieldError(
                    ("code", "args", name), f"{place}: {node.name} takes no argument {name!r}{hint}"
                )
            )
    faults += [
        FieldError(("code", "args", name), f"{place}: {node.name} needs the argument {name!r}")
        for name in required
        if name not in code.args
    ]
    return list(few(faults))


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
