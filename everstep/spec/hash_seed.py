"""Fix the order in which Python iterates over sets of strings: one PYTHONHASHSEED for all
processes."""

from __future__ import annotations

import os
import sys

VARIABLE, FIXED = "PYTHONHASHSEED", "0"


def fix_hash_seed() -> None:
    """Re-execute this program with a fixed PYTHONHASHSEED, unless one is set or a debugger is
    attached.

    A task that builds data or weights from a set would otherwise build different ones on each rank
    and in each attempt. Python reads the variable only at startup.
    """
    if os.environ.get(VARIABLE, "random") != "random" or sys.gettrace() is not None:
        return
    os.environ[VARIABLE] = FIXED
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
