"""CONTRIBUTING.md: it names every room of the code, and what it names is there."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.partition("## Change X")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| change ")
]


def test_every_room_has_its_row() -> None:
    packages = {
        str(path.parent.relative_to(ROOT))
        for house in ("everstep", "storage", "service", "train_fn")
        for path in (ROOT / house).glob("*/__init__.py")
    }
    assert packages - set(re.findall(r"`([\w/]+)`", " ".join(row[1] for row in ROWS))) == set()


def test_what_the_table_names_is_there() -> None:
    for _, rooms, tests in ROWS:
        for name in re.findall(r"`([\w/]+)`", f"{rooms} {tests}"):
            assert (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file(), name
        if "make" not in tests:
            name = re.findall(r"`([\w/]+)`", tests)[0]
            assert list((ROOT / name).rglob("test_*.py")), f"{name} holds no tests"


HOUSES = ("everstep", "storage", "service", "train_fn")


@pytest.mark.parametrize(
    "room",
    sorted(
        path.parent.relative_to(ROOT)
        for house in HOUSES
        for path in (ROOT / house).rglob("__init__.py")
        if "migrations" not in path.parts
    ),
    ids=str,
)
def test_the_first_lines_of_a_room_name_what_it_has(room: Path) -> None:
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    assert text, f"{room}/__init__.py says nothing of the room"
    beside = [
        path.read_text() for path in (ROOT / room).glob("*.py") if "__init__" not in str(path)
    ]
    words = set(re.findall(r"\w+", "\n".join(beside)))
    for name in re.findall(r"`+([a-z_]+)`+", text):
        places = (room / name, room / f"{name}.py", Path(room.parts[0], name))
        assert name in words or any((ROOT / place).exists() for place in places), name


def test_files_that_code_and_pages_name_are_there() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = [name for name in listed.stdout.split() if (ROOT / name).exists()]
    known = {"/".join(Path(name).parts[at:]) for name in files for at in range(4)}
    named = re.compile(r"(?<![\w/.-])((?:everstep|storage|service|train_fn)/[\w/]+\.py)")
    within = re.compile(r"(?<![\w/.-])(?!pkg/|my_pkg/)([a-z_]+/[a-z_]+\.py)")
    for name in files:
        if name.startswith(HOUSES) and name.endswith(".py"):
            found = within.findall((ROOT / name).read_text())
        elif name.endswith(".md") and "history" not in name and name != "CHANGELOG.md":
            found = named.findall((ROOT / name).read_text())
        else:
            continue
        assert set(found) <= known, f"{name} names {sorted(set(found) - known)}"


def test_every_target_of_make_that_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)\b", TEXT)) - targets == set()
