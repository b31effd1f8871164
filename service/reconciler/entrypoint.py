"""The command of a submission's Ray job, and the points at which tests kill this process."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Sequence

CRASH_POINT_VARIABLE = "EVERSTEP_CRASH_POINT"

Entrypoint = Callable[[str, int], str]
"""(run id, submission) -> the shell command of its Ray job."""


DRIVER = ("python", "-m", "train_fn.driver")
"""The driver, with the ``python`` of the nodes."""


def driver_entrypoint(storage_uri: str, program: Sequence[str] = DRIVER) -> Entrypoint:
    """Return the command that starts a submission's driver. The embedded cluster has a ``program``
    of its own for that."""

    def command(run_id: str, submission: int) -> str:
        words = [
            *program,
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
    """Kill this process if EVERSTEP_CRASH_POINT is ``name``. Tests try each line of a start so."""
    if os.environ.get(CRASH_POINT_VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)
