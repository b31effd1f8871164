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
print(json.dumps([seconds, len(sys.modules), [name for name in unwanted if name in sys.modules]]))
"""
MOST = 1.6
"""Times the modules of its two dependencies; it is 1.4 times that. Seconds depend on what else the
machine does."""


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


def test_the_client_is_light() -> None:
    _, ours, loaded = imported("everstep.client.client")
    assert loaded == []
    assert ours < MOST * imported("httpx, pydantic")[1]


def imported(names: str) -> tuple[float, int, list[str]]:
    """What a fresh process takes for it, in seconds, how many modules it has then, and which of
    the server's."""
    program = PROGRAM.format(names)
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    taken, num_modules, loaded = json.loads(answer.stdout)
    return taken, num_modules, loaded


def test_the_command_line_needs_only_the_client() -> None:
    program = (
        "import everstep.cli.main, everstep.cli.demo, sys; print([name for name in "
        f"{SERVER_ONLY!r} if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.strip() == "[]"
