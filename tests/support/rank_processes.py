"""Ranks as processes of this machine: the id of their run, and their end."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train_fn.node.node_dir import shared_memory_root

DEADLINE_S = 120.0


def run_id_for(tmp_path: Path, name: str) -> str:
    """A run of its own; what it leaves in shared memory is removed when the tests end."""
    run_id = f"{name}-{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}-{os.getpid()}"
    atexit.register(shutil.rmtree, shared_memory_root() / run_id, ignore_errors=True)
    return run_id


def run_to_end(
    ranks: list[Any], meanwhile: Callable[[list[Any]], None] = lambda ranks: None
) -> None:
    """Start the processes, call ``meanwhile`` with them, and wait until all have ended. Fail if one
    does not; none is left."""
    for process in ranks:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    try:
        meanwhile(ranks)
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
        assert not hung, f"ranks {hung} did not end within {DEADLINE_S} s"
    finally:
        for process in ranks:
            process.kill()
            process.join()
