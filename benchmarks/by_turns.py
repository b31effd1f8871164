"""A loop that is protected and plain by turns, in the same processes, and its driver: ``python -m
benchmarks.by_turns``.

A plain step has the same model, loader and optimizer in torch's DDP at its defaults; no gate and no
totals, no copies of buffers, no ledger, no reports, no checkpoints, no snapshots, no watch. What is
left is a plain DDP loop, beside the processes that keep the run, which find nothing new; or alone,
when rank 0 has stopped these, too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from everstep.spec.sections import CheckpointSpec
from service.embedded.processes import CLUSTER_DIR_VARIABLE, members
from storage.run_control import Stop
from train_fn.context import WorkerContext
from train_fn.driver.command import main
from train_fn.loop.attempt import begin, take_step
from train_fn.loop.passes import StepModule
from train_fn.loop.step import set_rates
from train_fn.loop.training import RankProgress, Training, prepare

SETTLING = 14
"""Steps at a turn's begin that are not counted: what one kind does in the background may last into
the other's turn."""
SAVES = 3
"""Checkpoints in a protected turn, which saves as often as a run does by default."""
_SAVE_EVERY = CheckpointSpec().every_steps
assert isinstance(_SAVE_EVERY, int)
BLOCK = SETTLING + SAVES * _SAVE_EVERY
"""Steps of one turn."""
Kind = Literal["protected", "plain", "alone"]
ORDER: tuple[Kind, ...] = ("protected", "plain", "alone", "alone", "plain", "protected")
"""Of the turns, again and again, so that what drifts falls on all of them."""
TIMES_VARIABLE = "STEADY_TIMES"
"""File, in the spec's environment, to which rank 0 writes every Turn, as JSON."""
WORK = 2_000
"""What a fixed piece of work adds up: some 40 us."""
_KEEPERS = ("ray::EverstepController", "ray::LastingJournalActor")
"""Titles of the actors that keep the run."""


class Turn(NamedTuple):
    """What rank 0 tells of one turn."""

    kind: Kind
    steps_s: list[float]
    """Seconds of each step."""
    works_s: list[list[float]]
    """Of each rank, how long a fixed piece of work took before each step, and after the last."""


def train(ctx: WorkerContext) -> Stop | None:
    """Take turns of ``BLOCK`` steps."""
    training = prepare(ctx, RankProgress())
    begin(training)
    replica, saver = training.replica, training.session.saver
    passes = replica.passes
    assert passes.wrapped is not None
    protected_module, plain_module = passes.wrapped, _plain_module(training)
    keepers = _keepers() if ctx.world_rank == 0 else []
    turns: list[Turn] = []
    try:
        for number in range(passes.parts.total_steps // BLOCK):
            kind = ORDER[number % len(ORDER)]
            for keeper in keepers:
                os.kill(keeper, signal.SIGSTOP if kind == "alone" else signal.SIGCONT)
            passes.wrapped = protected_module if kind == "protected" else plain_module
            replica.state.closed_epochs = replica.state.epoch
            # the saves that plain steps left out are not made up for
            if ctx.world_rank == 0 and kind == "protected":
                saver._cadence.begun(replica.state.step, time.monotonic())
            training.clock.restart()
            turns.append(_turn(training, kind))
    finally:
        for keeper in keepers:
            os.kill(keeper, signal.SIGCONT)
    if ctx.world_rank == 0:
        Path(os.environ[TIMES_VARIABLE]).write_text(json.dumps(turns))
    return None


def _plain_module(training: Training) -> DistributedDataParallel:
    ctx = training.ctx
    return DistributedDataParallel(
        StepModule(training.replica.parts, ctx.spec.train, ctx.device, None)
    )


def _turn(training: Training, kind: Kind) -> Turn:
    steps_s, works_s = [], []
    for _ in range(BLOCK):
        works_s.append(_seconds_of_work())
        steps_s.append(_seconds_of_step(training, kind))
    return Turn(kind, steps_s, training.replica.peers.gather([*works_s, _seconds_of_work()]))


def _seconds_of_step(training: Training, kind: Kind) -> float:
    began = time.perf_counter()
    if kind == "protected":
        take_step(training)
    else:
        _take_plain_step(training)
    return time.perf_counter() - began


def _take_plain_step(training: Training) -> None:
    ctx, loader, exchange = training.ctx, training.loader, training.exchange
    parts, state = training.replica.parts, training.replica.state
    num_samples, share, *_ = training.plans.of(state.step)
    scale = ctx.world_size / num_samples
    num_passes = len(exchange.passes(share))
    for position in range(num_passes):
        batch = next(loader).batch if position < len(share) else None
        with exchange.around(position == num_passes - 1):
            loss_sum, _ = exchange.forward(batch, 0)
            state.scaler.scale(loss_sum * scale).backward()
    loader.prefetch()
    assert isinstance(state.optimizer, Optimizer)
    state.scaler.unscale_(state.optimizer)
    set_rates(training.rates, ctx.spec.schedule, parts)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1


def _seconds_of_work() -> float:
    """How fast this core is at the moment: the least of three, since what else runs here does not
    count."""

    def work() -> float:
        began, total = time.perf_counter(), 0
        for number in range(WORK):
            total += number
        return time.perf_counter() - began

    return min(work() for _ in range(3))


def _keepers() -> list[int]:
    """Process ids."""
    found = [
        process.pid
        for process in members(os.environ[CLUSTER_DIR_VARIABLE])
        if process.cmdline()[0].startswith(_KEEPERS)
    ]
    assert len(found) == len(_KEEPERS), f"the run's keepers are {found}"
    return found


if __name__ == "__main__":
    sys.exit(main(train="benchmarks.by_turns:train"))
