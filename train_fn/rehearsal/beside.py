"""The rehearsal of a run in a service: a process of its own on the driver's node.

It prints a line of JSON: what it found. Beside a run it takes only what nobody else wants, and ends
itself before memory or disk runs short. It ends with its driver, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from everstep.spec.run_spec import RunSpec
from storage.cluster import rehearsed_ranks, write_rehearsal
from storage.filesystem import Storage, open_storage
from storage.run_dir import RunDir

STEPS = 12
MOST_BATCHES = 5
"""Batches of an epoch of a task, so that two epochs end within the steps."""
LEAST_FREE = 0.15
"""Share of memory and of disk that stays free for others."""
_GUARD_S = 1.0
_MOST_CHARS = 4000
"""Longest text of a report."""


class EndedEarly(BaseException):
    """The rehearsal ends before it is made; the message says why. No handler of errors may take it
    for one."""


def main(storage: str, run_id: str, key: str, limit_s: str, *idle_only: str) -> None:
    """Rehearse a restart on a run's code. Print what was found, whatever that is."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what else is printed
    give_way(idle_only=bool(idle_only))
    # After giving way: this imports torch.
    from train_fn.node.secrets import process_redactor, secrets_set

    try:
        run_dir = RunDir(open_storage(storage), run_id)
        spec = run_dir.read_spec()
        with guarded(float(limit_s)), secrets_set(spec, process_redactor()):
            found = _found(run_dir.storage, spec, key)
    except EndedEarly as exc:
        found = _not_made(str(exc))
    except Exception as exc:  # whatever it is, the run that waits for it is told
        found = _not_made(f"{type(exc).__name__}: {exc}")
    with answers:
        json.dump(found, answers)


def _found(storage: Storage, spec: RunSpec, key: str) -> dict[str, Any]:
    """Return what a rehearsal showed, and keep that for other runs of the code."""
    from storage.code import CodeStore
    from train_fn.rehearsal.plan import rehearse
    from train_fn.user_code.packages import add_packages

    if spec.runtime_env is not None:
        add_packages(spec.runtime_env.pip)
    archive = None if spec.code is None else CodeStore(storage).read(spec.code.archive)
    here = {
        "scaling": spec.scaling.model_copy(update={"use_gpu": False}),
        "env": {name: value for name, value in spec.env.items() if name != "WANDB_MODE"},
    }
    made = rehearse(
        spec.model_copy(update=here),
        archive,
        ranks=rehearsed_ranks(spec),
        steps=STEPS,
        max_samples=None if spec.runs_own_function else MOST_BATCHES * spec.train.global_batch_size,
    )
    report = _shown(made.model_dump(mode="json"))
    if made.outcome == "impossible":
        row = next(row for row in made.rows if row.outcome == "impossible")
        return _not_made(row.text) | {"report": report}
    write_rehearsal(storage, key, report)
    return {"state": "made", "report": report, "reused": False}


def _not_made(text: str) -> dict[str, Any]:
    return {"state": "not_made", "text": _shown(text), "report": None, "reused": False}


def _shown(value: Any) -> Any:
    """Return a tree whose texts are short and hold no value of a secret."""
    from train_fn.node.secrets import process_redactor

    if isinstance(value, str):
        return process_redactor()(value)[-_MOST_CHARS:]
    if isinstance(value, dict):
        return {name: _shown(each) for name, each in value.items()}
    return [_shown(each) for each in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------- guard

# Take nothing from anybody: processors that are idle, and no memory or disk that may run short.


def give_way(*, idle_only: bool) -> None:
    """Let all other processes run before this one and those that it starts, and let the OOM killer
    take it first."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.nice(19)
    if idle_only:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@contextlib.contextmanager
def guarded(limit_s: float) -> Iterator[None]:
    """Raise EndedEarly in here after that time, once the driver is gone, or before memory or disk
    runs short.

    A timer looks, not a thread: ranks are forked from this process.
    """
    deadline = time.monotonic() + limit_s

    def look(number: int, frame: FrameType | None) -> None:
        reason = shortage()
        if time.monotonic() > deadline:
            reason = f"it took longer than {limit_s:g} s"
        if select.select([0], [], [], 0)[0] and not os.read(0, 1):
            reason = "the run ended first"
        if reason is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise EndedEarly(reason)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _GUARD_S, _GUARD_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def shortage() -> str | None:
    """Return what this node has too little of; None if there is enough of all."""
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(tempfile.gettempdir())
    for what, free in (
        ("memory", memory.available / memory.total),
        (f"disk at {tempfile.gettempdir()}", disk.free / disk.total),
    ):
        if free < LEAST_FREE:
            return f"the driver's node has only {free:.0%} of its {what} free"
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
