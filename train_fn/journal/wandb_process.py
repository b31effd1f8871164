"""``python -m train_fn.journal.wandb_process STORAGE RUN_ID SUBMISSION``: record a run at W&B until
standard input ends, as it does when the driver closes it or dies.

W&B's package is large, keeps threads and a program of its own, and waits for its server at exit.
None of that is in the driver.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from everstep.spec.run_spec import WANDB_KEY
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from train_fn.journal.wandb_tracking import WandbTracking

READ_S = 60.0
"""Longest wait for the last events; the driver ends this process earlier."""
NICE = 10


def main(argv: Sequence[str]) -> int:
    uri, run_id, submission = argv
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    os.nice(NICE)
    run_dir = RunDir(open_storage(uri), run_id)
    tracking = WandbTracking(run_dir, int(submission), bool(os.environ.get(WANDB_KEY)))
    with suppress(ImportError):  # the tracking says so
        importlib.import_module("wandb")  # takes seconds, which a short run does not have later
    tracking.start()
    while sys.stdin.buffer.read(1):
        pass
    tracking.close(READ_S)
    tracking.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
