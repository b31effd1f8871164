"""`import everstep` is for notebooks and scripts: fast, and without what only the server needs."""

from __future__ import annotations

import json
import subprocess
import sys

SERVER_ONLY = ("torch", "torchvision", "ray", "fastapi", "sqlalchemy", "pyarrow", "numpy", "storage", "service", "train_fn")
COMMAND_LINE_ONLY = ("typer", "yaml")
PROGRAM = f"""
import json, sys, time
started = time.process_time()
import everstep
seconds = time.process_time() - started
print(json.dumps([seconds, [name for name in {SERVER_ONLY + COMMAND_LINE_ONLY!r} if name in sys.modules]]))
"""


def test_import_is_fast_and_light() -> None:
    """Seconds of computing, and of five fresh processes the fastest: others may keep this machine busy."""
    seconds = []
    for _ in range(5):
        answer = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=60)
        taken, loaded = json.loads(answer.stdout)
        assert loaded == []
        seconds.append(taken)
    assert min(seconds) < 0.5


def test_the_command_line_needs_only_the_client() -> None:
    program = f"import everstep.cli, everstep.demo, sys; print([name for name in {SERVER_ONLY!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert answer.stdout.strip() == "[]"
