"""The process that writes a rank's checkpoints: ``python -m train_fn.checkpoint_process_main FD PID`` of the socket and the rank.

It ends with the rank's thread that started it. The state that it writes lies in memory that it maps and never changes.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from train_fn.processes import end_with_starter

if TYPE_CHECKING:
    from storage.checkpoints import CheckpointStore

TELL_S = 1.0
"""How often the rank hears that bytes move."""


class Told:
    """Sends the rank how far a checkpoint is."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._told_at = float("-inf")

    def moved(self) -> None:
        now = time.monotonic()
        if now - self._told_at >= TELL_S:
            self._told_at = now
            self._connection.send(("moved", None))

    def committing(self, name: str) -> None:
        self._connection.send(("committing", name))


def serve(connection: Connection) -> NoReturn:
    """Do what the rank asks for, one thing after the other. Raises EOFError or ConnectionError once it has closed its end."""
    # Torch, which takes seconds: by then this process must be one that ends with its rank.
    from train_fn.checkpoint_write import write_checkpoint
    from train_fn.shared_trees import TreeReceiver

    gc.freeze()  # what the imports made stays, and need not be looked through
    receiver = TreeReceiver(connection)
    store: CheckpointStore = receiver.receive()
    actions: dict[str, Callable[..., Any]] = {
        "write": lambda job, state: write_checkpoint(store, job, state, Told(connection)),
        "retain": store.retain,
    }
    connection.send("ready")
    while True:
        name, *arguments = receiver.receive()
        answer: tuple[str, Any]
        try:
            answer = ("answer", actions[name](*arguments))
        except Exception as exc:
            answer = ("error", portable(exc))
        del arguments
        connection.send(answer)


def portable(error: Exception) -> Exception:
    """The error with where it came from, which pickling loses; of one that cannot be pickled, what it says."""
    error.add_note("in the process that writes checkpoints:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        told = RuntimeError(f"{type(error).__name__}: {error}")
        told.__notes__ = error.__notes__
        return told
    return error


def main() -> None:
    fd, rank = map(int, sys.argv[1:])
    end_with_starter()
    if os.getppid() != rank:  # it ended before the kernel had been asked
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # the rank may still want to save when all of its group are told to end
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    with suppress(EOFError, ConnectionError):
        serve(Connection(fd))


if __name__ == "__main__":
    main()
