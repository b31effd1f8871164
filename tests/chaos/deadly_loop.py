"""The training loop with deaths at chosen places: a rank sends itself a signal there, in the middle
of what it does.

``spec.tags["strikes"]`` says where: ``place:rank:step:attempt:signal``, several of them separated
by spaces; ``step`` counts the steps done before. Places: ``start`` (before the replica is built),
``all_reduce`` (in the last backward, while peers wait for its gradients), ``commit`` (the optimizer
has stepped, the counters have not), ``evaluation``, ``checkpoint`` (files are written, the manifest
is not; rank 0), ``loader`` (the signal goes to the rank's loader processes).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from storage.checkpoints.writer import CheckpointWriter
from storage.run_dir import Stop
from train_fn.context import WorkerContext
from train_fn.loop import attempt as loop
from train_fn.loop import boundary
from train_fn.loop.replica import Replica
from train_fn.samples.ledger import Ledger
from train_fn.samples.loader import Loader


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
        os.kill(os.getpid(), self.signal)


def train(ctx: WorkerContext) -> Stop | None:
    for strike in map(Strike.parse, ctx.spec.tags["strikes"].split()):
        if (strike.rank, strike.attempt) == (ctx.world_rank, ctx.attempt):
            _PLACES[strike.place](strike)
    return loop.train(ctx)


def _at_start(strike: Strike) -> None:
    build = loop.build_replica

    def build_replica(ctx: WorkerContext) -> Replica:
        strike.fall()
        return build(ctx)

    loop.build_replica = build_replica


def _in_all_reduce(strike: Strike) -> None:
    join = Replica.join

    def join_and_watch(self: Replica, *, is_fresh: bool = False) -> None:
        join(self, is_fresh=is_fresh)

        def gradient_is_there(_: Any) -> None:
            # of the step's micro-batches
            is_last = getattr(self.wrapped, "require_backward_grad_sync", True)
            if is_last and self.state.step == strike.step and self.state.complete:
                strike.fall()

        # the first parameter's gradient is the last to come
        self.parameters[0].register_hook(gradient_is_there)

    Replica.join = join_and_watch  # type: ignore[method-assign]


def _in_commit(strike: Strike) -> None:
    commit = Ledger.commit

    def commit_or_die(self: Ledger, step: int, count: Any) -> None:
        if step == strike.step:
            strike.fall()
        commit(self, step, count)

    Ledger.commit = commit_or_die  # type: ignore[method-assign]


def _in_evaluation(strike: Strike) -> None:
    evaluate = boundary.evaluate

    def evaluate_or_die(ctx: WorkerContext, replica: Replica) -> dict[str, float]:
        if replica.state.step >= strike.step:
            strike.fall()
        return evaluate(ctx, replica)

    boundary.evaluate = evaluate_or_die


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
    "all_reduce": _in_all_reduce,
    "commit": _in_commit,
    "evaluation": _in_evaluation,
    "checkpoint": _in_checkpoint,
    "loader": _in_loader,
}
