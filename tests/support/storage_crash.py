"""Runs a scenario again and again, each time dying one system call later; ``python -m
tests.support.storage_crash NAME DIR``.

Death is os._exit right before a call of the OS, or in the middle of a write. Each run has its own
directory, ``DIR/001-before`` and so on, beside a file ``DIR/001-before.said`` with what the
scenario claimed to have reached before it died, and ``DIR/001-before.died`` with the call before
(or in the middle of) which it did.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.storage_places import event, save

CALLS = (
    "open",
    "write",
    "fsync",
    "fdatasync",
    "ftruncate",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
)
DIED = 77


class Countdown:
    """Ends the process at the ``number``-th call of the OS: before it, or (writes) after half of
    it."""

    def __init__(self, number: int, mode: str, died: Callable[[str], None]) -> None:
        self.left = number
        self.mode = mode
        self.died = died

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.died(f"{name} {_target(args)}")
                if self.mode == "half":
                    if name != "write":
                        os._exit(DIED)
                    call(args[0], bytes(args[1])[: len(args[1]) // 2])
                os._exit(DIED)
            return call(*args, **kwargs)

        return counted


def _target(args: tuple[Any, ...]) -> str:
    """The name of the file or directory that a call is about; of a rename the new one. Random parts
    are cut out."""
    about = args[1] if len(args) > 1 and isinstance(args[1], str | Path) else args[0]
    path = Path(f"/proc/self/fd/{about}").readlink() if isinstance(about, int) else Path(str(about))
    return re.sub(r"-?\b[0-9a-f]{12}\b", "", path.name).replace("..", ".")


def checkpoint(directory: Path, say: Callable[[str], None]) -> None:
    """A second checkpoint beside a first one; then the first is deleted, and a third replaces what
    was left unfinished."""
    run_dir = RunDir(open_storage(str(directory)), "run_crash")
    store = CheckpointStore(run_dir)
    save(run_dir, 50)
    say("committed 50")
    save(run_dir, 100, files={"model.pt": b"m" * 5000, "deep/er/state.pt": b"s" * 100})
    say("committed 100")
    say("deleting 50")
    store.retain(1, None)
    unfinished = store.begin(150, 1, 1)
    with unfinished.write_file("model.pt") as file:
        file.write(b"half")
    save(run_dir, 150)
    say("committed 150")
    store.retain(1, None)


def journal(directory: Path, say: Callable[[str], None]) -> None:
    """Three batches; the journal is opened again between the second and the third."""
    run_dir = RunDir(open_storage(str(directory)), "run_crash")
    writer = JournalWriter(run_dir, 1)
    for first in (1, 3):
        writer.append([event(first), event(first + 1)])
        say(f"durable {first + 1}")
    writer.close()
    with JournalWriter(run_dir, 1) as writer:
        writer.append([event(5), event(6)])
        say("durable 6")


SCENARIOS = {"checkpoint": checkpoint, "journal": journal}


def _notebook(path: Path) -> Callable[[str], None]:
    """Appends lines to a file through calls of the OS that are not counted."""
    path.touch()
    real_open, real_write = os.open, os.write

    def say(text: str) -> None:
        fd = real_open(path, os.O_WRONLY | os.O_APPEND)
        real_write(fd, f"{text}\n".encode())
        os.close(fd)

    return say


def run_until_it_survives(
    scenario: Callable[[Path, Callable[[str], None]], None], directory: Path, mode: str
) -> None:
    number = 0
    while True:
        number += 1
        place = directory / f"{number:03d}-{mode}"
        say = _notebook(directory / f"{number:03d}-{mode}.said")
        child = os.fork()
        if child == 0:
            countdown = Countdown(number, mode, _notebook(directory / f"{number:03d}-{mode}.died"))
            for name in CALLS:
                setattr(os, name, countdown.wrap(name, getattr(os, name)))
            scenario(place, say)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return
        if code != DIED:
            raise SystemExit(f"the scenario failed with exit code {code} at call {number}")


if __name__ == "__main__":
    for mode in ("before", "half"):
        run_until_it_survives(SCENARIOS[sys.argv[1]], Path(sys.argv[2]), mode)
