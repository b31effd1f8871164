"""Publishes snapshots and dies in between; ``python -m tests.support.snapshot_crash DIR``.

Beside the deaths at calls of the OS (storage_crash.py) there are those in the middle of a state's
file, which torch writes without Python: ``DIR/4096-bytes`` is what was left when the third state's
file reached that size.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.saves import make_state
from tests.support.storage_crash import run_until_it_survives
from train_fn.snapshots.store import Label, SnapshotStore
from train_fn.state.tensor_tree import digest

NUM_STEPS = 4
SIZES_BYTES = (0, 1, 1000, 4096, 10_000, 17_000)


def state_of(step: int) -> dict[str, Any]:
    model = nn.Linear(64, 64)
    for parameter in model.parameters():
        nn.init.constant_(parameter, float(step))
    state = make_state(model, torch.optim.SGD(model.parameters()))
    state.step = step
    return state.state_dict()


def publish(store: SnapshotStore, step: int) -> None:
    """As ``publish_snapshot`` does."""
    state = state_of(step)
    label = Label(1, 1, step, 0, digest(state), None)
    store.remove_older(label, keep=1)
    store.write(label, state)


def snapshots(directory: Path, say: Callable[[str], None]) -> None:
    for step in range(1, NUM_STEPS + 1):
        publish(SnapshotStore(directory, 1), step)
        say(str(step))


def die_at_size(directory: Path, size_bytes: int) -> None:
    """The third state is cut off where its file reaches ``size_bytes``: the kernel ends the process
    there."""
    child = os.fork()
    if child == 0:
        store = SnapshotStore(directory / f"{size_bytes}-bytes", 1)
        publish(store, 1)
        publish(store, 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))
        publish(store, 3)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != -signal.SIGXFSZ:
        raise SystemExit(f"the child should have died at {size_bytes} bytes; it ended with {code}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # no pool of threads that a fork would lack
    state_of(0)  # torch imports more at the first use of it, which a child then need not
    run_until_it_survives(snapshots, Path(sys.argv[1]), "before")
    for size_bytes in SIZES_BYTES:
        die_at_size(Path(sys.argv[1]), size_bytes)
