"""Count what a reader has to carry: files, lines, files a folder, circles of imports, double names.

`python scripts/measure_house.py` prints the figures. With `--check` it fails above a limit instead.
The limits only ever go down: whoever makes a house smaller lowers its limit, and whoever needs more
lines takes them from somewhere first.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSES = ("everstep", "storage", "service", "train_fn")

MAX_FILES = 423
MAX_LINES = {
    "everstep": 15_487,
    "storage": 5_710,
    "service": 26_786,
    "train_fn": 48_731,
    "tests": 84_552,
}
"""Lines of Python below each folder."""
MAX_FILES_A_FOLDER: dict[str, int] = {}
"""Folders that still have more than MAX_FILES_ELSEWHERE files."""
MAX_FILES_ELSEWHERE = 15
MAX_DOUBLED_NAMES = 5
MAX_IN_CIRCLES = {"everstep": 0, "storage": 0, "service": 0, "train_fn": 0}
"""Files of each house that import each other in a circle, imports for types alone included."""


def module_of(path: Path) -> str:
    """Return the dotted name of a file's module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_at_start(tree: ast.Module, *, with_types: bool = False) -> Iterator[str]:
    """Yield the full names that a module imports when it is imported itself, and ``with_types``
    those that it imports for types alone."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and (with_types or ast.unparse(node.test) != "TYPE_CHECKING"):
            waiting += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            waiting += node.body


def lines_of_imports(tree: ast.Module) -> int:
    """Return how many lines of a file are imports."""
    nodes = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)


def lines_below(folder: str) -> int:
    """Return how many lines of Python are below a folder of the repository."""
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def circle_in(edges: dict[str, set[str]]) -> list[str]:
    """Return the modules of one circle of imports, or an empty list."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as exc:
        return list(exc.args[1])
    return []


def imported_by(trees: dict[Path, ast.Module], *, with_types: bool = False) -> dict[str, set[str]]:
    """Return which of these modules each of them imports."""
    modules = {module_of(path) for path in trees}
    edges: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for name in imports_at_start(tree, with_types=with_types):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module_of(path):
                edges[module_of(path)].add(target)
    return edges


def in_circles(edges: dict[str, set[str]]) -> list[str]:
    """Return the modules that import themselves by way of others."""
    found = []
    for module in edges:
        reached, waiting = set[str](), list(edges[module])
        while waiting:
            if (each := waiting.pop()) not in reached:
                reached.add(each)
                waiting += edges.get(each, ())
        if module in reached:
            found.append(module)
    return found


def measure() -> tuple[dict[str, int], list[str]]:
    """Return the figures by name, and what is above its limit."""
    trees = {
        path: ast.parse(path.read_text())
        for house in HOUSES
        for path in sorted((ROOT / house).rglob("*.py"))
    }
    edges = imported_by(trees)
    round_about = in_circles(imported_by(trees, with_types=True))
    importers: Counter[str] = Counter()
    homes: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        importers.update(edges[module_of(path)])
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(path)
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in trees)
    circle = circle_in(edges)
    figures = {
        "files": len(trees),
        **{f"lines of {folder}": lines_below(folder) for folder in MAX_LINES},
        "lines of imports": sum(map(lines_of_imports, trees.values())),
        "folders": len(folders),
        "folders with more than 15 files": sum(count > 15 for count in folders.values()),
        "modules with one importer": sum(count == 1 for count in importers.values()),
        "modules in a circle": len(circle),
        **{
            f"files of {house} in circles, with types": sum(
                each.partition(".")[0] == house for each in round_about
            )
            for house in HOUSES
        },
        "type names defined twice": sum(len(places) > 1 for places in homes.values()),
    }
    problems = [
        f"{what}: {figures[what]} of at most {limit}"
        for what, limit in (
            ("files", MAX_FILES),
            *((f"lines of {folder}", limit) for folder, limit in MAX_LINES.items()),
            ("type names defined twice", MAX_DOUBLED_NAMES),
            *(
                (f"files of {house} in circles, with types", MAX_IN_CIRCLES[house])
                for house in HOUSES
            ),
        )
        if figures[what] > limit
    ]
    for folder, count in folders.items():
        limit = MAX_FILES_A_FOLDER.get(folder, MAX_FILES_ELSEWHERE)
        if count > limit:
            problems.append(f"{folder} has {count} files of at most {limit}")
    if circle:
        problems.append(f"modules import each other in a circle: {' -> '.join(circle)}")
    return figures, problems


def main() -> int:
    """Print the figures, and with ``--check`` only what is above a limit."""
    figures, problems = measure()
    checks = "--check" in sys.argv[1:]
    if not checks:
        for what, number in figures.items():
            print(f"{number:>8,}  {what}")
    for problem in problems:
        print(f"{problem}; take room from somewhere first (CONTRIBUTING.md)", file=sys.stderr)
    return int(checks and bool(problems))


if __name__ == "__main__":
    sys.exit(main())
