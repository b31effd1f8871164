"""The command of a submission's Ray job, and the points at which tests let this process die."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable

CRASH_POINT_VARIABLE = "EVERSTEP_CRASH_POINT"

Entrypoint = Callable[[str, int], str]
"""(run id, submission) -> the shell command of its Ray job."""


def driver_entrypoint(storage_uri: str) -> Entrypoint:
    """The command that starts a submission's driver, with ``python`` as the cluster's nodes have
    it."""

    def command(run_id: str, submission: int) -> str:
        words = [
            "python",
            "-m",
            "train_fn.driver",
            "--storage",
            storage_uri,
            "--run-id",
            run_id,
            "--submission",
            str(submission),
        ]
        return shlex.join(words)

    return command


def crash_point(name: str) -> None:
    """Die here by SIGKILL where the environment says so: how tests try every line between a row and
    its job."""
    if os.environ.get(CRASH_POINT_VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)
