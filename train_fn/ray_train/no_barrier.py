"""Start a group without Ray Train's barrier: an actor of its own, at which ranks meet when they
report. Ranks that never do would pay for its process in every start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from train_fn.ray_train.ray_internals import SynchronizationActor, worker_group_module


class NoBarrier:
    """Stands for the barrier, its class and its handle. Nobody calls it."""

    def options(self, **_: Any) -> NoBarrier:
        return self

    def remote(self, **_: Any) -> NoBarrier:
        return self


@contextmanager
def no_barrier() -> Iterator[None]:
    """Let Ray create no barrier inside the block. One group starts at a time."""
    worker_group_module.SynchronizationActor = NoBarrier()
    try:
        yield
    finally:
        worker_group_module.SynchronizationActor = SynchronizationActor


def end_barrier(barrier: Any) -> None:
    """End a group's barrier, if it has one."""
    if barrier is not None and not isinstance(barrier, NoBarrier):
        ray.kill(barrier)
