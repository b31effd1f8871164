"""Rules for uploaded code: size limits, file names, and which modules can be imported by which
name."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator

MAX_ARCHIVE_BYTES = 64 << 20
"""Maximum size of the archive as sent."""
MAX_UNPACKED_BYTES = 256 << 20
"""Maximum size of all files together."""
MAX_FILES = 10_000
MAX_PATH_BYTES = 512
MAX_DEPTH = 32
"""Maximum number of parts in a file's path."""

DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
REQUIREMENT_PATTERN = (
    r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(\[[A-Za-z0-9._,-]+\])?"
    r"( ?(==|>=|<=|~=|!=|<|>) ?[A-Za-z0-9.*+!]+)?( ?, ?(==|>=|<=|~=|!=|<|>) ?[A-Za-z0-9.*+!]+)*$"
)
"""A package by name, extras and versions."""
ENTRY_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"

MODULE_FLAG = "-m "
"""A script that begins with it is a module, run as ``python -m`` does."""
_MODULE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")

OWN_PACKAGES = frozenset({"everstep", "service", "storage", "train_fn"})
_STACK = frozenset(
    {
        "cloudpickle",
        "google",
        "grpc",
        "numpy",
        "psutil",
        "pyarrow",
        "pydantic",
        "pydantic_core",
        "ray",
        "torch",
        "torchvision",
        "yaml",
    }
)
"""Packages that ranks import. User modules come first on the path and would shadow them."""


def import_roots(paths: Collection[str]) -> tuple[str, ...]:
    """Return the directories of an archive that go on the path, in order. The archive's root is
    ``""``, the others end in ``/``.

    Besides the root these are ``src``, unless it is a package, and, if everything is in one
    directory that is not a package (as in archives from GitHub), that directory and its ``src``.

    >>> import_roots(["proj/src/mine/task.py", "proj/README.md"])
    ('', 'proj/', 'proj/src/')
    """
    tops = {path.partition("/")[0] for path in paths}
    bases = [""]
    if len(tops) == 1:
        [top] = tops
        if top not in paths and f"{top}/__init__.py" not in paths:
            bases.append(f"{top}/")
    roots: dict[str, None] = {}
    for base in bases:
        roots[base] = None
        source = f"{base}src/"
        if f"{source}__init__.py" not in paths and any(path.startswith(source) for path in paths):
            roots[source] = None
    return tuple(roots)


def modules(paths: Collection[str]) -> tuple[str, ...]:
    """Return the dotted names of all modules.

    >>> modules(["src/mine/__init__.py", "src/mine/task.py", "train.py", "notes-1.py"])
    ('mine', 'mine.task', 'train')
    """
    roots = import_roots(paths)
    return tuple(sorted({name for path in paths for name in _names(path, roots)}))


def module_path(
    paths: Collection[str], module: str, roots: Collection[str] | None = None
) -> str | None:
    """Return the file that ``import module`` runs; None if the archive has none.

    Args:
        roots: the archive's ``import_roots``, if known.
    """
    for root in import_roots(paths) if roots is None else roots:
        stem = root + module.replace(".", "/")
        for path in (f"{stem}/__init__.py", f"{stem}.py"):
            if path in paths:
                return path
    return None


def script_fault(script: str) -> str | None:
    """Return why ``script`` cannot name a script in an archive, and what to write instead; None if
    it can.

    >>> script_fault("/home/me/train.py")
    'is an absolute path; give its path in the archive, for example train.py'
    """
    if script.startswith(MODULE_FLAG):
        if _MODULE_NAME.fullmatch(script.removeprefix(MODULE_FLAG).strip()):
            return None
        return "is not a module's name after -m; write for example -m pkg.train"
    parts = script.split("/")
    if script.startswith(("/", "~")) or re.match(r"[A-Za-z]:", script):
        return "is an absolute path; give its path in the archive, for example train.py"
    if ".." in parts or "" in parts or "\\" in script or not script.isprintable():
        return "is not a plain path in the archive; write for example pkg/train.py"
    if not script.endswith(".py"):
        return "is not a Python file; give a path that ends in .py, or a module as -m pkg.train"
    return None


def script_path(paths: Collection[str], script: str) -> str | None:
    """Return the file of the archive that a valid ``script`` runs; None if the archive has none.

    >>> script_path(["proj/pkg/train.py", "proj/README.md"], "-m pkg.train")
    'proj/pkg/train.py'
    """
    if not script.startswith(MODULE_FLAG):
        plain = script.removeprefix("./")
        return next((root + plain for root in import_roots(paths) if root + plain in paths), None)
    module = script.removeprefix(MODULE_FLAG).strip()
    found = module_path(paths, module)
    if found is not None and found.endswith("/__init__.py"):
        found = module_path(paths, f"{module}.__main__")
    return found


def collisions(paths: Collection[str]) -> list[str]:
    """Return one message for each module whose name shadows another package, or is shadowed by
    one."""
    found = {}
    for root in import_roots(paths):
        for path in sorted(paths):
            if not path.startswith(root) or not path.endswith((".py", ".so")):
                continue
            first, separator, _ = path.removeprefix(root).partition("/")
            name = first if separator else first.partition(".")[0]
            regular = not separator or f"{root}{first}/__init__.py" in paths
            owner = _owner(name, regular=regular)
            if owner is not None:
                place = f"{root}{first}"
                found[place] = (
                    f"{place}: the name {name!r} is reserved for {owner}; rename it, or list it in "
                    ".everstepignore"
                )
    return list(found.values())


def _owner(name: str, *, regular: bool) -> str | None:
    """Return who owns a module's name. A directory without ``__init__.py`` never shadows the
    standard library."""
    if name in OWN_PACKAGES:
        return "Everstep itself"
    if name in _STACK:
        return "a package that every rank imports"
    if regular and name in sys.stdlib_module_names:
        return "Python's standard library"
    return None


def _names(path: str, roots: Collection[str]) -> Iterator[str]:
    """Yield the names under which a file can be imported. Files in ``src`` only have their names
    below it."""
    sources = [root for root in roots if root.endswith("src/") and path.startswith(root)]
    for root in sources or roots:
        if not path.endswith(".py") or not path.startswith(root):
            continue
        parts = path.removeprefix(root).removesuffix(".py").split("/")
        if parts[-1] == "__init__":
            parts.pop()
        if parts and all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", part) for part in parts):
            yield ".".join(parts)
