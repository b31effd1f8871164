"""Draw docs/images/house.svg: the rooms of each house and which imports which, read from the code.

`python scripts/draw_house.py` writes the picture. With `--check` it compares instead, and fails
where the picture is out of date. Rooms are packages and modules directly below a house. A room
stands below every room that it imports nothing from and that imports it. An arrow that follows from
others (A to B to C stands for A to C) is left out.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "house.svg"
COLUMNS = (("service", "storage"), ("train_fn", "everstep"))
ROOM_HEIGHT, ROW_GAP, ROOM_GAP, MARGIN, LETTER = 26, 34, 12, 20, 7.2
HOUSE_WIDTH = 580

Edges = dict[str, set[str]]


class Place(NamedTuple):
    """Where a room is drawn."""

    x: float
    y: float
    width: float

    @property
    def top(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + ROOM_HEIGHT


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the full names that a file imports, now or in a function; not those for type
    checkers."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            waiting += ast.iter_child_nodes(node)


def rooms_of(house: str) -> Edges:
    """Return the rooms of a house, each with the rooms of the same house that it imports."""
    base = ROOT / house
    rooms = {path.stem for path in base.glob("*.py") if path.stem != "__init__"}
    rooms |= {path.parent.name for path in base.glob("*/__init__.py")}
    edges: Edges = {room: set() for room in rooms}
    for path in sorted(base.rglob("*.py")):
        room = path.relative_to(base).parts[0].removesuffix(".py")
        for name in imported_modules(path):
            parts = name.split(".")
            is_ours = parts[0] == house and len(parts) > 1 and {room, parts[1]} <= rooms
            if is_ours and parts[1] != room:
                edges[room].add(parts[1])
    return edges


def circle_in(edges: Edges) -> list[str]:
    """Return the rooms that a circle of imports keeps from being put in order, empty where there is
    none."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as exc:
        return list(exc.args[1])
    return []


def depths(edges: Edges) -> dict[str, int]:
    """Return each room's row, counted from below: 0 for one that imports no other."""
    known: dict[str, int] = {}

    def depth(room: str) -> int:
        if room not in known:
            known[room] = 1 + max(map(depth, edges[room]), default=-1)
        return known[room]

    for room in edges:
        depth(room)
    return known


def reduced(edges: Edges) -> Edges:
    """Return the edges without those that follow from others."""

    def reachable(room: str) -> set[str]:
        return set().union(*({target} | reachable(target) for target in edges[room]))

    def follows(target: str, targets: set[str]) -> bool:
        return any(target in reachable(other) for other in targets - {target})

    return {
        room: {target for target in targets if not follows(target, targets)}
        for room, targets in edges.items()
    }


def places_of(edges: Edges, left: float, top: float) -> tuple[dict[str, Place], float]:
    """Return where each room stands, in rows that are centred, and the y below the last row."""
    rows: dict[int, list[str]] = {}
    for room, depth in sorted(depths(edges).items()):
        rows.setdefault(depth, []).append(room)
    places: dict[str, Place] = {}
    y = top
    for depth in sorted(rows, reverse=True):
        widths = [LETTER * len(room) + 18 for room in rows[depth]]
        x = left + (HOUSE_WIDTH - sum(widths) - ROOM_GAP * (len(widths) - 1)) / 2
        for room, width in zip(rows[depth], widths, strict=True):
            places[room] = Place(x, y, width)
            x += width + ROOM_GAP
        y += ROOM_HEIGHT + ROW_GAP
    return places, y - ROW_GAP


def draw_house(house: str, left: float, top: float) -> tuple[list[str], float]:
    """Return the drawing of one house and the y at which it ends."""
    edges = rooms_of(house)
    if circle := circle_in(edges):
        raise SystemExit(f"{house}: these rooms import each other in a circle: {', '.join(circle)}")
    packages = {path.parent.name for path in (ROOT / house).glob("*/__init__.py")}
    places, end = places_of(edges, left, top + 40)
    end += MARGIN
    drawn = [
        (
            f'<rect class="house" x="{left}" y="{top}" width="{HOUSE_WIDTH}" '
            f'height="{end - top:g}" '
            'rx="8"/>'
        ),
        f'<text class="name" x="{left + 16}" y="{top + 24}">{house}/</text>',
    ]
    for room, targets in sorted(reduced(edges).items()):
        x, y = places[room].bottom
        for target in sorted(targets):
            to_x, to_y = places[target].top
            path = f"M{x:g} {y:g}C{x:g} {y + 20:g} {to_x:g} {to_y - 20:g} {to_x:g} {to_y - 2:g}"
            drawn.append(f'<path class="import" d="{path}"/>')
    for room, place in sorted(places.items()):
        kind = "room" if room in packages else "file"
        drawn.append(
            f'<rect class="{kind}" x="{place.x:g}" y="{place.y:g}" width="{place.width:g}" '
            f'height="{ROOM_HEIGHT}" rx="4"/>'
        )
        drawn.append(f'<text x="{place.x + 9:g}" y="{place.y + 17:g}">{room}</text>')
    return drawn, end


def picture() -> str:
    """Return the SVG. Raises SystemExit where rooms import each other in a circle."""
    body: list[str] = []
    bottom = 0.0
    for column in COLUMNS:
        left, top = MARGIN + COLUMNS.index(column) * (HOUSE_WIDTH + MARGIN), float(MARGIN)
        for house in column:
            drawn, end = draw_house(house, left, top)
            body += drawn
            top = end + MARGIN
        bottom = max(bottom, top)
    style = (
        "text{font:12px ui-monospace,monospace;fill:#1f2328}.name{font-size:15px;font-weight:700}"
        ".house{fill:#f6f8fa;stroke:#d1d9e0}.room{fill:#ddf4ff;stroke:#54aeff}"
        ".file{fill:#fff;stroke:#8c959f}"
        ".import{fill:none;stroke:#8c959f;marker-end:url(#tip)}"
    )
    tip = (
        '<marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0L6 3L0 6z" fill="#8c959f"/></marker>'
    )
    width = MARGIN + len(COLUMNS) * (HOUSE_WIDTH + MARGIN)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom:g}" role="img" '
        'aria-label="The rooms of the code, and which import which">'
    )
    return "\n".join([head, f"<style>{style}</style><defs>{tip}</defs>", *body, "</svg>", ""])


def main() -> None:
    drawn = picture()
    if "--check" not in sys.argv:
        PICTURE.write_text(drawn)
    elif not PICTURE.exists() or PICTURE.read_text() != drawn:
        raise SystemExit(
            f"{PICTURE.relative_to(ROOT)} is not what the imports say; run `python "
            "scripts/draw_house.py`"
        )


if __name__ == "__main__":
    main()
