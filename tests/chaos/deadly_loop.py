"""The training loop with deaths at chosen places: a rank sends itself a signal there, in the middle
of what it does.

``spec.tags["strikes"]`` says where: ``place:rank:step:attempt:signal``, several of them separated
by spaces; ``step`` counts the steps done before. Places: ``start`` (before the replica is built),
``backward`` (of an earlier micro-batch of the step), ``all_reduce`` (in the last backward, while
peers wait for its gradients), ``device`` and ``memory`` (there, too: instead of a signal, a kernel
writes where it must not, or the device has no memory left), ``commit`` (the optimizer has stepped,
the counters have not), ``evaluation``, ``checkpoint`` (files are written, the manifest is not; rank
0), ``loader`` (the signal goes to the rank's loader processes).

Places with a number, as ``save.3``, are steps of what rank 0 does to the storage: before the call
of the system of this number, from 0, and after the last one. ``claim`` is the claim of its attempt;
``save`` the commit of a checkpoint, which looks at the claim first, since the journal is taken for
silent; ``abort`` the end of a save that failed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from storage.checkpoints.writer import CheckpointWriter
from storage.errors import StorageUnavailable
from storage.run_control import Stop
from train_fn.checkpoints.commit import Committer
from train_fn.context import WorkerContext
from train_fn.loop import attempt, epoch_end
from train_fn.loop import training as preparing
from train_fn.loop.replica import Replica
from train_fn.samples.ledger import Ledger
from train_fn.samples.loader import Loader
from train_fn.session import session as restoring


@dataclass(frozen=True)
class Strike:
    place: str
    rank: int
    step: int
    attempt: int
    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.place}:{self.rank}:{self.step}:{self.attempt}:{self.signal.name}"

    @classmethod
    def parse(cls, text: str) -> Strike:
        place, rank, step, attempt, name = text.split(":")
        return cls(place, int(rank), int(step), int(attempt), signal.Signals[name])

    def fall(self) -> None:
        """Send the signal, once in a process: one that is woken may serve the next attempt."""
        if self not in _FALLEN:
            _FALLEN.add(self)
            os.kill(os.getpid(), self.signal)


_FALLEN: set[Strike] = set()


def train(ctx: WorkerContext) -> Stop | None:
    for strike in map(Strike.parse, ctx.spec.tags["strikes"].split()):
        if (strike.rank, strike.attempt) == (ctx.world_rank, ctx.attempt):
            section, _, number = strike.place.partition(".")
            if number:
                _SECTIONS[section](_Steps(strike, int(number)), strike.step)
                ctx = replace(ctx, holds_lease=lambda timeout_s: False)
            else:
                _PLACES[strike.place](strike)
    return attempt.train(ctx)


class _Steps:
    """Falls before one of the calls of the system with which a thread reads and changes files from
    ``enter`` to ``leave``, or at ``leave`` where there were just so many."""

    def __init__(self, strike: Strike, number: int) -> None:
        self._strike = strike
        self._left = number
        self._thread: int | None = None

    def enter(self) -> None:
        self._thread = threading.get_ident()
        sys.addaudithook(self._hear)

    def leave(self) -> None:
        if self._thread is not None:
            self._count()
            self._thread = None

    def _hear(self, event: str, _: Any) -> None:
        if self._thread == threading.get_ident() and event in _CALLS:
            self._count()

    def _count(self) -> None:
        if self._left == 0:
            self._strike.fall()
        self._left -= 1


_CALLS = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}


def _in_claim(steps: _Steps, _: int) -> None:
    claim = restoring.claim_attempt

    def claim_or_die(*args: Any) -> None:
        steps.enter()
        claim(*args)
        steps.leave()

    restoring.claim_attempt = claim_or_die  # type: ignore[attr-defined]


def _in_save(steps: _Steps, step: int) -> None:
    require_newest, commit = Committer._require_newest, CheckpointWriter.commit

    def look_or_die(self: Committer) -> None:
        if self._tried is not None and self._tried.startswith(f"step-{step:09d}"):
            steps.enter()
        require_newest(self)

    def commit_or_die(self: CheckpointWriter, **facts: Any) -> Any:
        manifest = commit(self, **facts)
        steps.leave()
        return manifest

    Committer._require_newest = look_or_die  # type: ignore[method-assign]
    CheckpointWriter.commit = commit_or_die  # type: ignore[method-assign]


def _in_abort(steps: _Steps, step: int) -> None:
    commit, abort = CheckpointWriter.commit, CheckpointWriter.abort

    def commit_or_fail(self: CheckpointWriter, **facts: Any) -> Any:
        if self.name.startswith(f"step-{step:09d}"):
            raise StorageUnavailable("the storage does not take this checkpoint")
        return commit(self, **facts)

    def abort_or_die(self: CheckpointWriter) -> None:
        steps.enter()
        abort(self)
        steps.leave()

    CheckpointWriter.commit = commit_or_fail  # type: ignore[method-assign]
    CheckpointWriter.abort = abort_or_die  # type: ignore[method-assign]


_SECTIONS: dict[str, Callable[[_Steps, int], None]] = {
    "claim": _in_claim,
    "save": _in_save,
    "abort": _in_abort,
}


def _at_start(strike: Strike) -> None:
    build = preparing.Replica

    def build_replica(ctx: WorkerContext) -> Replica:
        strike.fall()
        return build(ctx)

    preparing.Replica = build_replica  # type: ignore[misc,assignment]


KERNEL = 'extern "C" __global__ void reach_out(float* x) { x[1ull << 40] = 1.0f; }'


def break_device(device: torch.device) -> None:
    """Launch a kernel whose error comes later. Where there is no GPU, raise what torch would."""
    if device.type != "cuda":
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    kernel = torch.cuda._compile_kernel(KERNEL, "reach_out")
    kernel((1, 1, 1), (1, 1, 1), (torch.zeros(1, device=device),))


def _exhaust(device: torch.device) -> None:
    """Want more memory than any GPU has."""
    if device.type != "cuda":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1048576.00 GiB")
    torch.empty(1 << 50, dtype=torch.uint8, device=device)


def _in_device(strike: Strike) -> None:
    _in_backward(strike, break_device)


def _in_memory(strike: Strike) -> None:
    _in_backward(strike, _exhaust)


def _in_all_reduce(strike: Strike) -> None:
    _in_backward(strike, lambda device: strike.fall())


def _in_an_earlier_backward(strike: Strike) -> None:
    _in_backward(strike, lambda device: strike.fall(), is_last=False)


def _in_backward(
    strike: Strike, fall: Callable[[torch.device], None], *, is_last: bool = True
) -> None:
    join = preparing.join

    def join_and_watch(ctx: WorkerContext, replica: Replica, **how: bool) -> None:
        join(ctx, replica, **how)
        state, parameters = replica.state, replica.parts.trained.parameters

        def gradient_is_there(_: Any) -> None:
            # of the step's micro-batches
            syncs = getattr(replica.passes.wrapped, "require_backward_grad_sync", True)
            if syncs == is_last and state.step == strike.step and state.complete:
                fall(parameters[0].device)

        # the first parameter's gradient is the last to come
        parameters[0].register_hook(gradient_is_there)

    preparing.join = join_and_watch


def _in_commit(strike: Strike) -> None:
    commit = Ledger.commit

    def commit_or_die(self: Ledger, step: int, count: Any) -> None:
        if step == strike.step:
            strike.fall()
        commit(self, step, count)

    Ledger.commit = commit_or_die  # type: ignore[method-assign]


def _in_evaluation(strike: Strike) -> None:
    evaluate = epoch_end.evaluate

    def evaluate_or_die(ctx: WorkerContext, replica: Replica) -> dict[str, float]:
        if replica.state.step >= strike.step:
            strike.fall()
        return evaluate(ctx, replica)

    epoch_end.evaluate = evaluate_or_die


def _in_checkpoint(strike: Strike) -> None:
    def die(self: CheckpointWriter, **_: Any) -> Any:
        strike.fall()

    CheckpointWriter.commit = die  # type: ignore[method-assign]


def _in_loader(strike: Strike) -> None:
    load, num_loaded = Loader.__next__, 0

    def load_from_the_struck(self: Loader) -> Any:
        nonlocal num_loaded
        num_loaded += 1
        if num_loaded == strike.step + 1:
            for process in psutil.Process().children():
                process.send_signal(strike.signal)
        return load(self)

    Loader.__next__ = load_from_the_struck  # type: ignore[method-assign]


_PLACES: dict[str, Callable[[Strike], None]] = {
    "start": _at_start,
    "backward": _in_an_earlier_backward,
    "all_reduce": _in_all_reduce,
    "device": _in_device,
    "memory": _in_memory,
    "commit": _in_commit,
    "evaluation": _in_evaluation,
    "checkpoint": _in_checkpoint,
    "loader": _in_loader,
}
