"""A process that writes checkpoints and can write at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import psutil

from storage.checkpoints import CheckpointStore
from train_fn.checkpoint_process import CheckpointProcess


@contextlib.contextmanager
def ready_process(store: CheckpointStore) -> Iterator[CheckpointProcess]:
    """It imports in the ordinary class: where tests fill all cores, it would get next to nothing in the class IDLE."""
    process = CheckpointProcess(store)
    process.start()
    try:
        process._give_way(idle=False)
        assert process._connection is not None
        assert process._connection.poll(120)
        yield process
    finally:
        process.end()


def child_of(process: CheckpointProcess) -> psutil.Process:
    assert process._process is not None
    return psutil.Process(process._process.pid)


def wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
