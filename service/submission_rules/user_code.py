"""Check a user's code before a run begins: syntax, entry point, arguments of methods and class.

No code is executed. What the syntax tree does not show passes, for example a class that a function
makes, names of a ``*`` import, or bases from other packages: the ranks report faults there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from everstep.code import MAX_DEPTH, MODULE_FLAG, import_roots, module_path, modules, script_path
from everstep.errors import FieldError
from everstep.spec.code import CodeSpec
from everstep.spec.parsing import few
from everstep.text.words import closest

REQUIRED_METHODS = {"build_model": 0, "build_datasets": 0, "loss": 2}
"""Methods that a task must have -> number of arguments of each call."""
OPTIONAL_METHODS = {
    "metrics": 2,
    "build_metrics": 0,
    "training_step": 4,
    "build_optimizer": 1,
    "build_scheduler": 2,
    "after_step": 2,
    "shard_modules": 1,
    "collate": 1,
    "on_epoch_end": 3,
    "state_dict": 0,
    "load_state_dict": 1,
}
GIVEN_BY_NAME = {"loss": frozenset({"step", "epoch"})}
"""Further parameters that a method may have, which it gets by name."""

_MAX_SUGGESTIONS = 10


def faults_of(code: CodeSpec, files: Mapping[str, bytes]) -> list[FieldError]:
    """Return every certain fault of the code that ``code`` names, with file and line if known.

    Args:
        code: The spec's entry point and arguments.
        files: Path -> content of each file of the archive.
    """
    tree = ModuleTree(files)
    if code.script is not None:
        return _script_faults(tree, code.script)
    field, entry = ("task", code.task) if code.task else ("train_fn", code.train_fn)
    assert entry is not None
    where = ("code", field)
    module_name, _, name = entry.partition(":")
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
    broken = _syntax_faults(tree, path, module_name)
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


def _syntax_faults(tree: ModuleTree, path: str, module_name: str) -> list[str]:
    """Return the syntax errors of a module, of the packages around it, and of what they import."""
    packages = [
        tree.path_of(module_name.rsplit(".", depth)[0])
        for depth in range(1, module_name.count(".") + 1)
    ]
    read = dict.fromkeys(
        file for start in (path, *packages) if start is not None for file in tree.reachable(start)
    )
    return [problem for problem in map(tree.parse, read) if isinstance(problem, str)]


def _script_faults(tree: ModuleTree, script: str) -> list[FieldError]:
    """Return why the archive has no such script, or the syntax errors of what it runs."""
    where = ("code", "script")
    is_module = script.startswith(MODULE_FLAG)
    module_name = script.removeprefix(MODULE_FLAG).strip() if is_module else ""
    path = script_path(tree.files.keys(), script)
    if path is None:
        scripts = sorted(each for each in tree.files if each.endswith(".py"))
        known = modules(tree.files.keys()) if is_module else scripts
        near = closest(module_name or script, known)
        kind = "module" if is_module else "file"
        found = f"{', '.join(known[:10])}{', …' if len(known) > 10 else ''}"
        hint = f"did you mean {near}?" if near else f"its {kind}s are {found}"
        return [FieldError(where, f"the archive has no {kind} {module_name or script!r}; {hint}")]
    return [FieldError(where, problem) for problem in _syntax_faults(tree, path, module_name)]


def _function_faults(found: Found, where: tuple[str, ...]) -> list[FieldError]:
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
                    f"{place}: {node.name} needs more arguments than it gets; let it take config, "
                    "or nothing"
                ),
            )
        ]
    return []


def _class_faults(tree: ModuleTree, found: Found, where: tuple[str, ...]) -> list[FieldError]:
    """Return the methods that are missing, or that cannot be called as Everstep calls them."""
    node = found.node
    assert node is not None
    if not isinstance(node, ast.ClassDef):
        return []  # A function that returns a task is allowed.
    members = tree.members(found)
    required = dict(REQUIRED_METHODS)
    if "training_step" in members.methods or "training_step" in members.others:
        del required["loss"]
    faults = []
    for name, num_arguments in (REQUIRED_METHODS | OPTIONAL_METHODS).items():
        if name in members.methods:
            path, method = members.methods[name]
            fault = _call_fault(method, num_arguments, GIVEN_BY_NAME.get(name, frozenset()))
            if fault:
                faults.append(
                    FieldError(where, f"{_place(path, method)}: {node.name}.{name} {fault}")
                )
        elif name in required and members.complete and name not in members.others:
            needed = ", ".join(required)
            message = (
                f"{_place(found.path, node)}: class {node.name} has no method {name}; a task "
                f"needs {needed}"
            )
            faults.append(FieldError(where, message))
    return faults


def _call_fault(
    method: Function, num_arguments: int, by_name: Set[str] = frozenset()
) -> str | None:
    """Return why a method cannot be called with so many positional arguments, and those that
    ``by_name`` lists if it has parameters for them.

    None if it can, or if a decorator may change its arguments.
    """
    if isinstance(method, ast.AsyncFunctionDef):
        return "is async; a task's methods are plain functions"
    decorators = {node.id for node in method.decorator_list if isinstance(node, ast.Name)}
    if len(decorators) != len(method.decorator_list) or decorators - {
        "staticmethod",
        "classmethod",
    }:
        return None
    given = num_arguments + ("staticmethod" not in decorators)
    parameters = [*method.args.posonlyargs, *method.args.args]
    num_needed = len(parameters) - len(method.args.defaults)
    lacking = {each.arg for each in parameters[given:num_needed]} | set(_needed_by_name(method))
    has_room = given <= len(parameters) or method.args.vararg is not None
    is_filled = lacking <= by_name and not lacking & {each.arg for each in method.args.posonlyargs}
    if has_room and is_filled:
        return None
    beside = "" if "staticmethod" in decorators else " beside self"
    return (
        f"is called with {num_arguments} argument{'' if num_arguments == 1 else 's'}{beside}; "
        "change its parameters to take them"
    )


def _needed_by_name(function: Function) -> list[str]:
    """Return the parameters that must be given by name."""
    arguments = function.args
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [argument.arg for argument, default in pairs if default is None]


def _argument_faults(found: Found, code: CodeSpec) -> list[FieldError]:
    """Return the faults of ``args`` by the class's own ``__init__``."""
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


def _place(path: str, node: ast.ClassDef | Function) -> str:
    return f"{path}, line {node.lineno}"


# ---------------------------------------------------------------- module tree

# The modules of an uploaded archive as syntax trees, with their names and classes.
#
# What a tree does not show counts as unknown. No code is executed.

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
