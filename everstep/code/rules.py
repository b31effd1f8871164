"""What uploaded code may be: how much of it, what its files may be called, and what of it can be
imported by which name."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator

MAX_ARCHIVE_BYTES = 64 << 20
"""Largest archive as it is sent."""
MAX_UNPACKED_BYTES = 256 << 20
"""Most bytes in all its files together."""
MAX_FILES = 10_000
MAX_PATH_BYTES = 512
MAX_DEPTH = 32
"""Most parts of a file's path."""

DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
REQUIREMENT_PATTERN = (
    r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(\[[A-Za-z0-9._,-]+\])?"
    r"( ?(==|>=|<=|~=|!=|<|>) ?[A-Za-z0-9.*+!]+)?( ?, ?(==|>=|<=|~=|!=|<|>) ?[A-Za-z0-9.*+!]+)*$"
)
"""A package by name, extras and versions."""
ENTRY_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"

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
"""What ranks import beside the user's code. A module of the user's stands before them on the path,
and would take their place."""


def import_roots(paths: Collection[str]) -> tuple[str, ...]:
    """Directories of an archive that are put on the path, in order; the archive's own is ``""``,
    the others end in ``/``.

    Beside the archive's own: ``src``, unless it is a package, and, where everything lies in one
    directory that is no package (as in archives that GitHub makes), that directory and its ``src``.

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
    """Dotted names of all modules.

    >>> modules(["src/mine/__init__.py", "src/mine/task.py", "train.py", "notes-1.py"])
    ('mine', 'mine.task', 'train')
    """
    roots = import_roots(paths)
    return tuple(sorted({name for path in paths for name in _names(path, roots)}))


def module_path(
    paths: Collection[str], module: str, roots: Collection[str] | None = None
) -> str | None:
    """The file that ``import module`` runs; None where the archive has none. ``roots`` are its
    ``import_roots``, where known."""
    for root in import_roots(paths) if roots is None else roots:
        stem = root + module.replace(".", "/")
        for path in (f"{stem}/__init__.py", f"{stem}.py"):
            if path in paths:
                return path
    return None


def collisions(paths: Collection[str]) -> list[str]:
    """What is wrong with the names of the archive's modules, one sentence each: they would take
    another's place, or lose to it."""
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
                    f"{place}: the name {name!r} belongs to {owner}; rename it, or list it in "
                    ".everstepignore"
                )
    return list(found.values())


def _owner(name: str, *, regular: bool) -> str | None:
    """Whose a module's name is; a directory without ``__init__.py`` never takes a standard module's
    place."""
    if name in OWN_PACKAGES:
        return "Everstep itself"
    if name in _STACK:
        return "a package that every rank imports"
    if regular and name in sys.stdlib_module_names:
        return "Python's standard library"
    return None


def _names(path: str, roots: Collection[str]) -> Iterator[str]:
    """Names under which a file can be imported; what lies in a ``src`` goes by the name that it has
    there."""
    sources = [root for root in roots if root.endswith("src/") and path.startswith(root)]
    for root in sources or roots:
        if not path.endswith(".py") or not path.startswith(root):
            continue
        parts = path.removeprefix(root).removesuffix(".py").split("/")
        if parts[-1] == "__init__":
            parts.pop()
        if parts and all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", part) for part in parts):
            yield ".".join(parts)
