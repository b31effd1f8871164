"""The order in which Python lists sets of strings: the same in every process that runs with one
PYTHONHASHSEED."""

from __future__ import annotations

import os
import sys

VARIABLE, FIXED = "PYTHONHASHSEED", "0"


def fix_hash_seed() -> None:
    """Start this program again, in this process, where the order of its sets is drawn anew for each
    process.

    A task that builds data or weights from a set would build others on each rank and in each
    attempt. Python reads the variable before anything else, so that it can only be set for a
    program that begins. Under a debugger nothing is done.
    """
    if os.environ.get(VARIABLE, "random") != "random" or sys.gettrace() is not None:
        return
    os.environ[VARIABLE] = FIXED
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
