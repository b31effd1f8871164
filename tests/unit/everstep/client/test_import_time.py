"""`import everstep` is for notebooks and scripts: fast, and without what only the server needs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import everstep

SERVER_ONLY = (
    "torch",
    "torchvision",
    "ray",
    "fastapi",
    "sqlalchemy",
    "pyarrow",
    "numpy",
    "storage",
    "service",
    "train_fn",
)
COMMAND_LINE_ONLY = ("typer", "yaml")
WHEN_USED = ("everstep.client.async_client",)
"""With asyncio, which takes as long as a fourth of the dependencies."""
PROGRAM = f"""
import json, sys, time
started = time.process_time()
import {{}}
seconds = time.process_time() - started
unwanted = {SERVER_ONLY + COMMAND_LINE_ONLY + WHEN_USED!r}
print(json.dumps([seconds, [name for name in unwanted if name in sys.modules]]))
"""
MOST = 5.0
"""Times what the import of its two dependencies takes; it is 3.7 times that, and 0.45 s on a busy
machine."""


def test_import_takes_milliseconds_until_a_name_is_used() -> None:
    assert min(imported("everstep")[0] for _ in range(3)) < 0.1


def test_the_names_that_are_imported_late_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(everstep.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == everstep._MODULE_OF
    assert set(seen) == set(everstep.__all__) - {"__version__"}


def test_the_client_is_fast_and_light() -> None:
    """Seconds of computing, and of five fresh processes the fastest, beside those of its
    dependencies."""
    ours, theirs = [], []
    for _ in range(5):
        taken, loaded = imported("everstep.client.client")
        assert loaded == []
        ours.append(taken)
        theirs.append(imported("httpx, pydantic")[0])
    assert min(ours) < MOST * min(theirs)


def imported(names: str) -> tuple[float, list[str]]:
    """What a fresh process takes for it, in seconds, and which modules of the server it has
    then."""
    program = PROGRAM.format(names)
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    taken, loaded = json.loads(answer.stdout)
    return taken, loaded


def test_the_command_line_needs_only_the_client() -> None:
    program = (
        "import everstep.cli.main, everstep.cli.demo, sys; print([name for name in "
        f"{SERVER_ONLY!r} if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.strip() == "[]"
