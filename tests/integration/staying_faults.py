"""Faults that a process of a staying rank brings about once, when it is about to take a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from train_fn.errors import PeersGone

STEP = 5
"""Steps done when a fault strikes."""


def _once(owner: Any, name: str, strike: Callable[..., None], *, after: bool = False) -> None:
    """Call ``strike`` with the arguments of ``owner.name``, before or after it, until it raises."""
    call = getattr(owner, name)

    def struck(*arguments: Any, **named: Any) -> Any:
        answer = call(*arguments, **named) if after else None
        try:
            strike(*arguments)
        except BaseException:
            setattr(owner, name, call)
            raise
        return answer if after else call(*arguments, **named)

    setattr(owner, name, struck)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_exchange() -> None:
    """What forward passes change is on its way, and gradients are not."""
    from train_fn.step.buffers import VolatileBuffers

    start = VolatileBuffers.start
    num_starts = 0

    def start_and_die(self: VolatileBuffers) -> None:
        nonlocal num_starts
        start(self)
        num_starts += 1
        if num_starts > STEP:
            _die()

    VolatileBuffers.start = start_and_die  # type: ignore[method-assign]


def die_in_the_commit() -> None:
    """The weights have moved, and the counters have not."""
    from train_fn.samples.ledger import Ledger

    def strike(ledger: Any, step: int, *_: Any) -> None:
        if step == STEP:
            _die()

    _once(Ledger, "commit", strike)


def die_in_the_evaluation() -> None:
    """Its share is measured, and its peers wait for it."""
    from train_fn.tasks.metrics import OwnMetrics, TreeMetrics

    def strike(*_: Any) -> None:
        _die()

    _once(OwnMetrics, "states", strike)
    _once(TreeMetrics, "states", strike)


def die_while_ranks_meet() -> None:
    """In the middle of the first pass of an attempt."""
    from train_fn.loop import first_pass

    def strike(*_: Any) -> None:
        _die()

    _once(first_pass, "_backward", strike)


def lose_the_result() -> None:
    """The others pass the gate, and this rank's connections break right before it."""
    from train_fn.loop import attempt

    def strike(training: Any, *_: Any) -> None:
        if training.replica.state.step == STEP:
            raise PeersGone("the result did not arrive")

    _once(attempt, "require_whole", strike)


def lose_a_peer_in_the_commit() -> None:
    """As if code in the commit waited for others: half of the state is of the next step."""
    from train_fn.samples.ledger import Ledger

    def strike(ledger: Any, step: int, *_: Any) -> None:
        if step == STEP:
            raise PeersGone("in the middle of a commit")

    _once(Ledger, "commit", strike)


def fail_by_itself() -> None:
    from train_fn.loop import attempt

    def strike(training: Any, *_: Any) -> None:
        if training.replica.state.step == STEP:
            raise ValueError("an error of the task")

    _once(attempt, "require_whole", strike)


def flip_a_kept_bit() -> None:
    """In the weights that this process keeps, as if it had been wrong when the rank left."""
    from train_fn.checks.audit import flip_low_bit
    from train_fn.loop import survivor
    from train_fn.snapshots import store

    stay: Any = store.take()
    state = stay.parts.state
    flip_low_bit(next(state.model.parameters()).data)
    survivor.keep(stay.parts, stay.ctx, state.state_dict())


def send_no_tensor() -> None:
    """The state is read where it is, or nowhere."""
    from train_fn.session import restore

    def refuse(*_: Any) -> Any:
        raise AssertionError("a tensor of the state is sent")

    restore._flat = refuse


def may_not_read() -> None:
    """The kernel lets no process read another one's memory, after a part of it."""
    from train_fn.session import restore

    def refuse(window: Any, tensors: Any) -> Any:
        for tensor in tensors:
            tensor.zero_()
        raise PermissionError(1, "Operation not permitted")

    restore.read_memory = refuse


def die_while_read() -> None:
    """Another process reads the memory of this one."""
    from train_fn.session import restore

    def strike(*_: Any) -> None:
        _die()

    _once(restore, "word_sums", strike)


def read_another_bit() -> None:
    from train_fn.session import restore

    read = restore.read_memory

    def flipped(window: Any, tensors: Any) -> Any:
        found = read(window, tensors)
        return [found[0] ^ 1, *found[1:]]

    restore.read_memory = flipped


def insure_without_end() -> None:
    """A large state is insured as soon as it is kept, and its writing does not end by itself."""
    import threading
    import time

    from train_fn.loop import survivor
    from train_fn.snapshots import store
    from train_fn.snapshots.state_file import go_on, write_state

    keep, begun = survivor.keep, threading.Event()

    def keep_and_insure(*arguments: Any) -> None:
        keep(*arguments)
        threading.Thread(target=store.insure, daemon=True).start()
        assert begun.wait(20)

    def never_written(path: Any, state: Any, check: Callable[[], None]) -> str:
        if check is go_on:  # of a publication
            return write_state(path, state)
        begun.set()
        while True:
            check()
            time.sleep(0.001)

    survivor.SOON_WRITTEN_BYTES = 0
    survivor.keep = keep_and_insure
    store.write_state = never_written
